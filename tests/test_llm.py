"""The language model of the examples: a small one from GGUF and from a Hugging Face folder, its text, its command."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eformer.examples.llm import Sampling, Tokenizer, empty_cache, forward, generate, hidden, load_model, logits
from eformer.examples.llm.__main__ import Stream, main
from eformer.examples.llm.generate import choose
from eformer.examples.llm.quantize import quantizing

from eformer import implicit
from eformer.checkpoint import save, save_gguf

pytestmark = pytest.mark.usefixtures("compile_quickly")
WIDTH, HIDDEN, HEADS, KV_HEADS = 64, 96, 4, 2
LETTERS = [chr(code) for code in range(33, 127)]
TOKENS = [*LETTERS, "Ġ", "Ċ", "he", "Ġt", "Ġthe", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "Ġ t", "Ġt he"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in TOKENS],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
    "tokenizer.chat_template": TEMPLATE,
}
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
FOLDER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


@pytest.fixture(autouse=True)
def plain_jax():
    """A user's model adds arrays of several ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


def random_weights(family: str) -> dict[str, np.ndarray]:
    """Of a model of two layers; Qwen2 with biases, Llama with an output layer."""
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()}
    shapes |= {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    if family == "llama":
        shapes["output.weight"] = (len(TOKENS), WIDTH)
    else:
        parts = {"attn_q": WIDTH, "attn_k": WIDTH // 2, "attn_v": WIDTH // 2}
        shapes |= {f"blk.{i}.{name}.bias": (size,) for i in range(2) for name, size in parts.items()}
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}


def write_gguf(path: Path, family: str, type: str = "Q8_0", **more: Any) -> Path:
    sizes = {
        "block_count": 2,
        "embedding_length": WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **more,
    }
    metadata = {"general.architecture": family} | {f"{family}.{name}": value for name, value in sizes.items()}
    return save_gguf(path, random_weights(family), type=type, metadata=metadata | TOKENIZER)


def write_folder(folder: Path, family: str) -> Path:
    """The model of `write_gguf` under the names of Hugging Face, where heads of Llama have another order."""
    tree = {}
    for name, array in random_weights(family).items():
        *layer, own, end = name.split(".")
        if family == "llama" and own in ("attn_q", "attn_k"):
            heads = HEADS if own == "attn_q" else KV_HEADS
            array = array.reshape(heads, -1, 2, WIDTH).swapaxes(1, 2).reshape(array.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        tree[f"{prefix}{FOLDER_NAMES[own]}.{end}"] = array
    save(folder, tree)
    config = {
        "model_type": family,
        "num_hidden_layers": 2,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer.from_gguf(TOKENIZER)._tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


PROMPT = [3, 14, 15, 9, 2, 6]


def all_logits(params: Any, config: Any, tokens: list[int]) -> np.ndarray:
    run = jax.jit(implicit(functools.partial(forward, config=config)))
    return np.asarray(run(params, jnp.asarray([tokens], jnp.int32)))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_file_and_folder_give_the_same_logits(family: str, tmp_path: Path):
    gguf = load_model(write_gguf(tmp_path / "m.gguf", family, "F32"))
    folder = load_model(write_folder(tmp_path / "model", family))
    assert set(gguf.params) == set(folder.params)
    expected = all_logits(gguf.params, gguf.config, PROMPT)
    found = all_logits(folder.params, folder.config, PROMPT)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.ptp(expected))
    text = " the <|im_end|>!"
    assert folder.tokenizer().encode(text) == gguf.tokenizer().encode(text)
    assert folder.tokenizer().ends == gguf.tokenizer().ends


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_token_by_token_is_all_at_once(family: str, tmp_path: Path):
    params, config, _ = load_model(write_gguf(tmp_path / "m.gguf", family))
    assert "blk.0.attn_q+attn_k+attn_v.weight" in params
    expected = all_logits(params, config, PROMPT)
    run = jax.jit(implicit(functools.partial(hidden, config=config)))
    cache, parts = empty_cache(config, 1, len(PROMPT) + 2), []
    for start, stop in [(0, 4), (4, 5), (5, 6)]:
        x, cache = run(params, jnp.asarray([PROMPT[start:stop]]), jnp.int32(start), cache)
        parts.append(implicit(logits)(params, x))
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, rtol=0, atol=1e-4 * np.ptp(expected))


def joined_portions(portions: Iterable[list[list[int]]]) -> list[list[int]]:
    return [list(itertools.chain(*parts)) for parts in zip(*portions, strict=True)]


def test_generation_takes_the_likeliest_token_of_each_step(tmp_path: Path):
    """For prompts of several lengths in one batch; a text stops before the token that ends it."""
    params, config, _ = load_model(write_gguf(tmp_path / "m.gguf", "llama"))
    prompts, count = [PROMPT, PROMPT[:2]], 6
    found = joined_portions(generate(params, config, prompts, count))
    for prompt, tokens in zip(prompts, found, strict=True):
        scores = all_logits(params, config, [*prompt, *tokens])[0, len(prompt) - 1 : -1]
        assert tokens == np.argmax(scores, axis=-1).tolist()
    end = found[0][3]
    (shorter,) = joined_portions(generate(params, config, prompts[:1], count, ends=[end]))
    assert shorter == found[0][: found[0].index(end)]


def test_requantized_models_run_near_float32(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", "qwen2")
    dense, config, _ = load_model(path, quantizing("float32"))
    small, _, _ = load_model(path, quantizing("int8", activations="int8"))
    assert small["blk.1.ffn_down.weight"].activation_dtype == "int8"
    assert small["token_embd.weight"].nbytes < dense["token_embd.weight"].nbytes / 3
    expected, found = (all_logits(params, config, PROMPT) for params in (dense, small))
    assert 0 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.05


def test_choices():
    scores = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
    keys = jax.random.split(jax.random.key(0), 200)

    def drawn(sampling: Sampling) -> set[int]:
        return set(jax.vmap(lambda key: choose(scores, sampling, key)[0])(keys).tolist())

    assert drawn(Sampling()) == {1}
    assert drawn(Sampling(1.0)) == {0, 1, 2, 3}
    assert drawn(Sampling(1.0, top_k=2)) == {1, 3}
    assert drawn(Sampling(1.0, top_p=0.7)) == {1, 3}
    assert drawn(Sampling(1.0, top_k=3, top_p=0.5)) == {1}
    with pytest.raises(ValueError, match="top_p above 0"):
        Sampling(top_p=0.0).checked()


@pytest.mark.parametrize("text", ["the the\nthe 123", " a<|im_start|>b"])
def test_text_and_back(text: str):
    tokenizer = Tokenizer.from_gguf(TOKENIZER)
    tokens = tokenizer.encode(text)
    assert tokenizer._tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert "<|" not in tokenizer.decode(tokens)
    pieces = [TOKENS[token] for token in tokenizer.encode("the the\nthe 12")]
    assert pieces == ["t", "he", "Ġthe", "Ċ", "t", "he", "Ġ", "1", "2"]


def test_chat():
    tokenizer = Tokenizer.from_gguf(TOKENIZER)
    prompt = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.ends == (TOKENS.index("<|im_end|>"),)
    without = Tokenizer.from_gguf({**TOKENIZER, "tokenizer.chat_template": "{{ raise_exception('no') }}"})
    with pytest.raises(ValueError, match="refuses the messages: no"):
        without.chat([])
    with pytest.raises(ValueError, match=r"'llama' with .* reads 'gpt2'"):
        Tokenizer.from_gguf({**TOKENIZER, "tokenizer.ggml.model": "llama"})


def test_a_stream_waits_for_whole_characters(capsys: pytest.CaptureFixture[str]):
    class Bytes:
        def decode(self, tokens: list[int]) -> str:
            return bytes(tokens).decode(errors="replace")

    stream = Stream(Bytes())  # pyright: ignore[reportArgumentType]
    for count in range(1, 5):
        stream.show(list("aéb".encode())[:count])
    stream.end()
    assert capsys.readouterr().out == "aéb\n"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_gguf(tmp_path / "m.gguf", "llama")
    assert main([str(path), "the", "--chat", "--count", "3", "--format", "int4,fit=false"]) == 0
    ran = capsys.readouterr()
    assert "s to the first token" in ran.err
    assert main([str(path), "the", "a", "--count", "2", "--quiet", "--temperature", "0.5", "--top-k", "5"]) == 0
    assert capsys.readouterr().out.startswith("--- the\n")
    assert main([str(path), "the", "--format", "int99"]) == 1
    assert "unknown format 'int99'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "--activations int8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "more", "match"),
    [
        ("bert", {}, "family 'bert'; this code runs llama, qwen2"),
        ("llama", {"expert_count": 8}, "without experts"),
        ("llama", {"rope.scaling.type": "yarn"}, "plain RoPE"),
        ("llama", {"rope.dimension_count": 8}, "whole heads"),
    ],
)
def test_other_models_are_refused(family: str, more: Any, match: str, tmp_path: Path):
    with pytest.raises(ValueError, match=match):
        load_model(write_gguf(tmp_path / "m.gguf", family, **more))


def test_other_folders_are_refused(tmp_path: Path):
    folder = write_folder(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": {"type": "yarn"}}))
    with pytest.raises(ValueError, match="plain RoPE"):
        load_model(folder)
