"""Each family of language models beside `transformers`, and as the examples write text with it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eformer.examples.llm import forward, load_model
from eformer.examples.llm.engine import Engine
from eformer.examples.llm.tokenizer import SPACE, Tokenizer
from golden_llm import FAMILIES, GOLDEN, TOKENS, weight

from eformer import explain, implicit, materialize, quantize, save
from eformer.ops.quantization import QuantizedArray

STORED = {"mlp.experts": "block_sparse_moe.experts", "mlp.gate": "block_sparse_moe.gate"}
STORED |= {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # as files of Mixtral name them


@pytest.fixture(autouse=True)
def plain_jax():
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def write(folder: Path, family: str) -> Path:
    tree = {name: weight(name, tuple(shape)) for name, shape in golden()[family]["shapes"].items()}
    if family == "mixtral":
        for there, stored in STORED.items():
            tree = {name.replace(there, stored): array for name, array in tree.items()}
    save(folder, tree)
    (folder / "config.json").write_text(json.dumps(golden()[family]["config"]))
    return folder


def all_logits(params: Any, config: Any, tokens: list[int]) -> jax.Array:
    return jax.jit(implicit(functools.partial(forward, config=config)))(params, jnp.asarray([tokens], jnp.int32))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path):
    params, config, _ = load_model(write(tmp_path / "model", family))
    expected = np.array(golden()[family]["logits"])
    found = all_logits(params, config, TOKENS)[-3:]
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * np.ptp(expected))


def _in_8_bits(name: str, array: Any) -> Any:
    """All weights, as small as they are."""
    del name
    return quantize(array, "int8", axis=-1) if array.ndim == 2 else array


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe"])
def test_texts_of_several_lengths_are_written_side_by_side(family: str, tmp_path: Path):
    """A window counts positions of its own text, wherever the text stands in the cache; quantized experts stay so."""
    params, config, _ = load_model(write(tmp_path / "model", family), _in_8_bits)
    texts = Engine(params, config, (), rows=2, longest=40)
    found = [[*TOKENS[:length], texts.begin(row, TOKENS[:length])[0]] for row, length in enumerate((9, 17))]
    for row, new in texts.write(3).items():
        found[row] += new
    dense = jax.tree.map(materialize, params, is_leaf=lambda x: isinstance(x, QuantizedArray))
    for length, tokens in zip((9, 17), found, strict=True):
        scores = all_logits(dense, config, tokens)[length - 1 : -1]
        assert tokens[length:] == np.argmax(scores, axis=-1).tolist()
    if family == "qwen3_moe":
        assert isinstance(params["blk.0.ffn_up_exps.weight"], QuantizedArray)
    said = explain(functools.partial(forward, config=config))(params, jnp.asarray([TOKENS], jnp.int32))
    assert said.dense_bytes == 0, said


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        *("<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))),
        *(SPACE, "a", "b", "ab", SPACE + "a", SPACE + "ab", "ba", "<end_of_turn>"),
    ],
    "tokenizer.ggml.token_type": [3, 3, *[6] * 256, *[1] * 7, 3],
    "tokenizer.ggml.scores": [0.0] * 258 + [-9.0, -8.0, -7.0, -1.0, -2.0, -0.5, -3.0, 0.0],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": False,
}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab ab", ["ab", SPACE + "ab"]),
        ("aba", ["ab", "a"]),  # the better score first, not the longer
        ("baab", ["ba", "ab"]),
        ("aé", ["a", "<0xC3>", "<0xA9>"]),
        ("", []),
        ("ab<end_of_turn> a", ["ab", "<end_of_turn>", SPACE + "a"]),
    ],
)
def test_pieces_of_sentencepiece(text: str, pieces: list[str]):
    made, tokens = Tokenizer.from_gguf(SENTENCEPIECE), SENTENCEPIECE["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in made.encode(text)] == ["<s>", *pieces]
    assert made.decode(made.encode(text)) == text.replace("<end_of_turn>", "")
    assert tokens.index("<end_of_turn>") in made.ends
