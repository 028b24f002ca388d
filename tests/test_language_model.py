"""The language model of the examples: a small one, written and read as GGUF, in one run and token by token."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import implicit
from eformer.checkpoint import save_gguf

EXAMPLE = Path(__file__).parent.parent / "examples" / "language_model.py"
WIDTH, HIDDEN, HEADS, KV_HEADS, VOCABULARY = 64, 96, 4, 2, 50
SHAPES = {
    "attn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH // 2, WIDTH),
    "attn_v": (WIDTH // 2, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_norm": (WIDTH,),
    "ffn_gate": (HIDDEN, WIDTH),
    "ffn_up": (HIDDEN, WIDTH),
    "ffn_down": (WIDTH, HIDDEN),
}


@pytest.fixture(autouse=True)
def plain_jax():
    """A user's model adds arrays of several ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def write_model(path: Path, family: str, **more: Any) -> Path:
    """A file with a random model of two layers; Qwen2 with biases, Llama with an output layer."""
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()}
    shapes |= {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    if family == "llama":
        shapes["output.weight"] = (VOCABULARY, WIDTH)
    else:
        parts = {"attn_q": WIDTH, "attn_k": WIDTH // 2, "attn_v": WIDTH // 2}
        shapes |= {f"blk.{i}.{name}.bias": (size,) for i in range(2) for name, size in parts.items()}
    random = np.random.default_rng(0)
    tree = {name: random.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    sizes = {
        "block_count": 2,
        "embedding_length": WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **more,
    }
    metadata = {"general.architecture": family} | {f"{family}.{name}": value for name, value in sizes.items()}
    return save_gguf(path, tree, type="Q8_0", metadata=metadata)


TOKENS = np.array([[3, 14, 15, 9, 2, 6]], np.int32)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_token_by_token_is_all_at_once(family: str, example: dict[str, Any], tmp_path: Path):
    params, config = example["load_model"](write_model(tmp_path / "m.gguf", family))
    expected = jax.jit(implicit(functools.partial(example["forward"], config=config)))(params, jnp.asarray(TOKENS))
    run = jax.jit(implicit(functools.partial(example["step"], config=config)))
    cache, parts = example["empty_cache"](config, 1, TOKENS.shape[1] + 2), []
    for start, stop in [(0, 4), (4, 5), (5, 6)]:
        logits, cache = run(params, jnp.asarray(TOKENS[:, start:stop]), jnp.int32(start), cache)
        parts.append(logits)
    assert expected.shape == (1, TOKENS.shape[1], VOCABULARY)
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, rtol=0, atol=1e-4 * np.ptp(expected))


def test_greedy_takes_the_likeliest(example: dict[str, Any], tmp_path: Path):
    params, config = example["load_model"](write_model(tmp_path / "m.gguf", "qwen2"))
    found = example["greedy"](params, TOKENS[0].tolist(), 2, config)
    tokens = jnp.asarray([[*TOKENS[0], found[0]]], jnp.int32)
    logits = implicit(functools.partial(example["forward"], config=config))(params, tokens)
    assert found == jnp.argmax(logits[0, -2:], axis=-1).tolist()


@pytest.mark.parametrize(
    ("family", "more", "match"),
    [
        ("bert", {}, "family 'bert'; this code runs llama, qwen2"),
        ("llama", {"expert_count": 8}, "without experts"),
        ("llama", {"rope.scaling.type": "yarn"}, "plain RoPE"),
        ("llama", {"rope.dimension_count": 8}, "whole heads"),
    ],
)
def test_other_models_are_refused(family: str, more: Any, match: str, example: dict[str, Any], tmp_path: Path):
    with pytest.raises(ValueError, match=match):
        example["load_model"](write_model(tmp_path / "m.gguf", family, **more))
