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
from eformer.examples.llm import (
    CACHES,
    Config,
    Request,
    Sampling,
    Tokenizer,
    chat,
    empty_cache,
    forward,
    hidden,
    load_model,
    logits,
    open_model,
)
from eformer.examples.llm.__main__ import Stream, main
from eformer.examples.llm.generation import BUCKET, generate
from eformer.examples.llm.model import PART, Cache
from eformer.examples.llm.quantize import quantizing
from eformer.examples.llm.sampling import choose
from small_llm import TOKENIZER, TOKENS, hugging_face_tokenizer, write_folder, write_gguf

from eformer import cli, explain, fuse, implicit, materialize, stored_bytes
from eformer._src.kernels import cpu
from eformer.cache import QuantizedCache
from eformer.checkpoint import open_checkpoint, save_gguf
from eformer.ops.quantization import QuantizedArray


@pytest.fixture(autouse=True)
def plain_jax():
    """A user's model adds arrays of several ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


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


@pytest.mark.parametrize("target", ["small.safetensors", "small"])
def test_a_gguf_file_that_was_quantized_again_runs(target: str, tmp_path: Path):
    source = write_gguf(tmp_path / "m.gguf", "llama", "F32")
    assert cli.main(["quantize", str(source), str(tmp_path / target), "--rule", "attn_[qkv]=int8"]) == 0
    expected, found = load_model(source), load_model(tmp_path / target)
    assert found.config == expected.config
    assert found.tokenizer().encode("a b the") == expected.tokenizer().encode("a b the")
    dense = {name: materialize(array) for name, array in found.params.items()}
    assert isinstance(found.params["blk.0.attn_q.weight"], QuantizedArray)
    logits = all_logits(dense, found.config, PROMPT)
    np.testing.assert_allclose(all_logits(found.params, found.config, PROMPT), logits, atol=1e-4 * np.ptp(logits))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_token_by_token_is_all_at_once(family: str, tmp_path: Path):
    params, config, _ = load_model(write_gguf(tmp_path / "m.gguf", family))
    expected = all_logits(params, config, PROMPT)
    run = jax.jit(implicit(functools.partial(hidden, config=config)))
    cache, parts = empty_cache(config, 1, len(PROMPT) + 2), []
    for start, stop in [(0, 4), (4, 5), (5, 6)]:
        x, cache = run(params, jnp.asarray([PROMPT[start:stop]]), jnp.int32(start), cache)
        parts.append(implicit(logits)(params, x))
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, rtol=0, atol=1e-4 * np.ptp(expected))


@pytest.mark.parametrize("make", [CACHES["float32"], CACHES["int8"]])
@pytest.mark.parametrize("length", [2 * PART, 2 * PART + 37])
def test_a_long_prompt_is_its_parts(length: int, make: Any, tmp_path: Path):
    """A long prompt attends in parts that leave out later entries: as if each part came in a call of its own."""
    params, config, _ = load_model(write_gguf(tmp_path / "m.gguf", "llama"))
    run = jax.jit(implicit(functools.partial(hidden, config=config)))
    tokens = jax.random.randint(jax.random.key(0), (2, length), 0, 99)
    padding, first = jnp.asarray([0, 5]), 3  # the prompt comes after three other tokens
    _, cache = run(params, tokens[:, -first:], jnp.int32(0), make(config, 2, first + length + 9), padding=padding)
    expected, parts = run(params, tokens, jnp.int32(first), cache, padding=padding)[0], []
    for start in range(0, length, PART):
        x, cache = run(params, tokens[:, start : start + PART], jnp.int32(first + start), cache, padding=padding)
        parts.append(x)
    found = np.concatenate(parts, axis=1)[:, 5:]
    np.testing.assert_allclose(found, expected[:, 5:], rtol=0, atol=1e-4 * np.ptp(expected[:, 5:]))
    assert explain(functools.partial(hidden, config=config))(params, tokens, jnp.int32(first), cache).dense_bytes == 0


@pytest.mark.skipif(not cpu.is_available(), reason="counts calls of the native core")
@pytest.mark.usefixtures("optimized")
def test_weights_that_meet_the_same_activations_are_one_call(tmp_path: Path):
    params, config, _ = load_model(write_gguf(tmp_path / "m.gguf", "llama", layers=1))
    run = jax.jit(fuse(implicit(functools.partial(forward, config=config))))
    program = run.lower(params, jnp.asarray([PROMPT], jnp.int32)).compile().as_text()
    assert program is not None
    assert program.count('custom_call_target="eformer_matmul"') == 3  # output, down and logits
    assert program.count('custom_call_target="eformer_matmuls"') == 2  # query, key and value; gate and up


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
    with pytest.raises(ValueError, match="6 tokens and 6 more do not fit into the model's context of 11"):
        next(generate(params, config._replace(context=11), prompts, count))
    end = found[0][3]
    (shorter,) = joined_portions(generate(params, config, prompts[:1], count, ends=[end]))
    assert shorter == found[0][: found[0].index(end)]


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize(("family", "times"), [("llama", 1), ("qwen2", 1), ("llama", 12)])
def test_the_first_token_is_compiled_before_the_weights_are_read(
    family: str, times: int, activations: str, tmp_path: Path
):
    """That of a short prompt, which goes through one layer after the other, and that of a long one."""
    change, prompt, traced = quantizing("file", activations=activations), PROMPT * times, []
    assert (len(prompt) > BUCKET) == (times > 1)

    def counted(config: Config, batch: int, length: int) -> Cache:
        traced.append(batch)
        return empty_cache(config, batch, length)

    with open_model(write_gguf(tmp_path / "m.gguf", family)) as opened:
        request = Request(opened.config, [prompt], 3, new_cache=counted)
        like = opened.like(change)
        request.compile(like)
        params = opened.read(change)
    assert jax.tree.structure(like) == jax.tree.structure(params)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(like)] == [(a.shape, a.dtype) for a in jax.tree.leaves(params)]
    assert traced == [1]
    (found,) = joined_portions(request.run(params))
    assert traced == [1]
    for n, token in enumerate(found):
        assert token == np.argmax(all_logits(params, request.config, [*prompt, *found[:n]])[0, -1])


@pytest.mark.parametrize("seed", [0, 7, -1, 2**31, 2**32 - 1])
def test_a_seed_is_that_of_jax(seed: int):
    config = Config(1, 1, 1, 2, 1e-5, 1e4, True, None)
    (_, _, given), _ = Request(config, [PROMPT], 1, seed=seed).inputs()
    keys = [jax.random.key_data(key) for key in (jax.jit(jax.random.key)(given), jax.random.key(seed))]
    assert np.array_equal(*keys)


@pytest.mark.parametrize(("format", "smaller", "most"), [("int8", 3, 0.02), ("fp8", 3, 0.1), ("int4", 5, 0.4)])
def test_a_quantized_cache_is_small_and_near(format: str, smaller: float, most: float, tmp_path: Path):
    """Only what a token writes is rounded, as the cache says; and nothing is made dense on the way."""
    params, config, _ = load_model(write_gguf(tmp_path / "m.gguf", "llama"))
    run = functools.partial(hidden, config=config)
    caches = [CACHES[name](config, 2, 8) for name in ("float32", format)]
    assert stored_bytes(caches[1]) < stored_bytes(caches[0]) / smaller
    tokens = jnp.asarray([PROMPT, PROMPT[::-1]], jnp.int32)
    (expected, exact), (found, rounded) = (jax.jit(implicit(run))(params, tokens, jnp.int32(1), c) for c in caches)
    for old, new in zip(exact[0], rounded[0], strict=True):  # of the first layer, whose input is the same
        assert isinstance(new, QuantizedCache)
        assert jnp.all(jnp.abs(materialize(new) - old) <= 1.02 * new.error_bound(old))
    assert 0 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < most
    assert explain(run)(params, tokens, jnp.int32(1), caches[1]).dense_bytes == 0
    portions = generate(params, config, [PROMPT], 4, new_cache=CACHES[format])
    assert len(joined_portions(portions)[0]) == 4


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


TEXTS = [
    "",
    "the the\nthe 123",
    " a<|im_start|>b",
    "<|im_end|><|im_end|> the<|im_end",
    "h" * 50 + "hehehethethe" * 20 + "  the",
    "caf\u00e9 \U0001f600 the",  # of these bytes the vocabulary has none
    "".join(np.random.default_rng(0).choice([*"the <|>\n", "<|im_end|>"], 500)),
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_back(text: str):
    tokenizer, expected = Tokenizer.from_gguf(TOKENIZER), hugging_face_tokenizer()
    tokens = tokenizer.encode(text)
    assert tokens == expected.encode(text).ids
    assert tokenizer.decode(tokens) == expected.decode(tokens)
    assert tokenizer.decode(tokens) == text.replace("<|im_start|>", "").replace("<|im_end|>", "") or not text.isascii()
    assert tokenizer.decode([*tokens, len(TOKENS), 10**6]) == tokenizer.decode(tokens)


def test_merges_come_in_their_order():
    tokenizer = Tokenizer.from_gguf(TOKENIZER)
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
    with pytest.raises(ValueError, match=r"'bert' with .* reads 'llama', and 'gpt2'"):
        Tokenizer.from_gguf({**TOKENIZER, "tokenizer.ggml.model": "bert"})
    with pytest.raises(ValueError, match=r"tokens, and the types of 0"):
        Tokenizer.from_gguf({**TOKENIZER, "tokenizer.ggml.token_type": []})


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
    assert main([str(path), ""]) == 1
    assert "a prompt is empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(path), "the", "--system", "Be brief."])
    assert "it needs --chat" in capsys.readouterr().err
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
        ("llama", {"expert_shared_count": 1}, "without shared experts"),
        ("llama", {"rope.scaling.type": "longrope"}, "RoPE of the kind 'longrope'"),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ("llama", {"rope.dimension_count": 8}, "whole heads"),
    ],
)
def test_other_models_are_refused(family: str, more: Any, match: str, tmp_path: Path):
    with pytest.raises(ValueError, match=match):
        load_model(write_gguf(tmp_path / "m.gguf", family, **more))


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE .*'dynamic'.*linear, llama3 and yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "on whole heads"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 9}},
            "a positive number as `low_freq_factor`",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "a positive number as `factor`, got None"),
        ({"use_sliding_window": True}, "attention to all tokens"),
    ],
)
def test_other_folders_are_refused(more: dict[str, Any], match: str, tmp_path: Path):
    folder = write_folder(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    with pytest.raises(ValueError, match=match):
        load_model(folder)


# Angles of the pairs of a head of 64 for one position, and the factor of cosines, by
# transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS (5.23) with theta 10000 and 2048 positions.
SCALED: dict[str, tuple[dict[str, Any], float, list[float]]] = {
    "linear": ({}, 1, [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05]),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        1,
        [1, 0.3162278, 0.1, 0.01849668, 0.00125, 0.0003952847, 0.000125, 3.952847e-05],
    ),
    "yarn": (
        {},
        1.138629436111989,
        [1, 0.2979839, 0.07115384, 0.01520326, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
    ),
}


def test_an_array_that_the_model_does_not_use_is_refused(tmp_path: Path):
    source, path = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", "F32")), tmp_path / "more.gguf"
    arrays = {**{name: source[name] for name in source}, "blk.0.ffn_up.scale": jnp.ones(1)}
    save_gguf(path, arrays, metadata=source.metadata)
    with pytest.raises(ValueError, match=r"the array 'blk\.0\.ffn_up\.scale' has no place in this model"):
        load_model(path)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rope_is_that_of_transformers(kind: str, key: str, tmp_path: Path):
    more, amplitude, expected = SCALED[kind]
    folder = write_folder(tmp_path / "model", "llama")
    said = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 512, **more}
    config = json.loads((folder / "config.json").read_text()) | {key: said, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with open_model(folder) as opened:
        rope = opened.config.rope
    np.testing.assert_allclose(rope.frequencies(64)[::4], expected, rtol=1e-6)
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize(("kind", "last"), [("linear", 0.25), ("yarn", 1.0)])
def test_scaled_rope_of_gguf(kind: str, last: float, tmp_path: Path):
    scaling = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}
    with open_model(write_gguf(tmp_path / "m.gguf", "llama", **scaling)) as opened:
        assert opened.config.rope.frequencies(64)[0] == last


def test_the_amplitude_of_yarn_is_of_queries_and_keys(tmp_path: Path):
    params, config, _ = load_model(write_gguf(tmp_path / "m.gguf", "llama", "F32"))
    scaled = config._replace(rope=config.rope._replace(amplitude=1.5))
    louder = {n: 1.5 * a if n.endswith(("attn_q.weight", "attn_k.weight")) else a for n, a in params.items()}
    expected = all_logits(louder, config, PROMPT)
    np.testing.assert_allclose(all_logits(params, scaled, PROMPT), expected, atol=1e-5 * np.ptp(expected))


# --- chat templates of strangers ---

ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 9 ** 999999999 }}",
    "a long text": "{{ 'a' * 10 ** 10 }}",
    "a long list": "{{ ([0] * 10 ** 10) | length }}",
    "a wide field": "{{ '%1000000000d' | format(1) }}",
    "a centre": "{{ 'a' | center(10 ** 10) }}",
    "doubling": "{% set t = namespace(a='aa') %}{% for i in range(60) %}{% set t.a = t.a + t.a %}{% endfor %}{{ t.a }}",
    "much output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep brackets": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "no number": "{{ 1 / 0 }}",
    "no jinja": "{% if %}",
    "out of the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_templates_are_bounded_in_time_and_output(name: str):
    with pytest.raises(ValueError, match=r"the chat template (takes more than|fails: )"):
        chat.render(ENDLESS[name], [{"role": "user", "content": "Hi"}])


def test_a_long_message_is_no_long_output():
    text = "word " * 500_000
    assert chat.render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text
