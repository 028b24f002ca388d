"""The language model of the examples as a reader uses it: text in, text out, texts side by side, and its commands."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eformer.examples.llm import Sampling, engine, forward, load_model, score
from eformer.examples.llm.engine import Engine
from eformer.examples.llm.generation import generate
from eformer.examples.llm.sampling import choose
from eformer.examples.llm.streaming import TextStream
from eformer.examples.llm.writer import load, with_adapter
from small_llm import write_folder, write_gguf

from eformer import cli, implicit
from eformer.checkpoint import save_adapter
from eformer.model import add_lora


@pytest.fixture(autouse=True)
def plain_jax():
    """A user's model adds arrays of several ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "m.gguf", "llama", layers=1)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts and caches, so that texts of few tokens fill several."""
    monkeypatch.setattr(engine, "PARTS", (4, 8))
    monkeypatch.setattr(engine, "LEAST", 16)


PROMPTS = [3, 14, 15, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [2, 7]


def alone(params: Any, config: Any, prompt: list[int], count: int) -> list[int]:
    return list(itertools.chain(*(portion[0] for portion in generate(params, config, [prompt], count))))


@pytest.mark.usefixtures("short")
def test_texts_side_by_side_are_what_each_is_alone(path: Path):
    """One begins after the other, in room that the first left, and the cache grows and moves meanwhile."""
    params, config, _ = load_model(path)
    texts = Engine(params, config, (), rows=2, longest=40)
    found = {i: [texts.begin(i, PROMPTS[i])[0]] for i in (0,)}
    found[0] += texts.write(5)[0]
    found[1] = [texts.begin(1, PROMPTS[1])[0]]
    for _ in range(3):
        for row, new in texts.write(4).items():
            found[row] += new
    texts.end(0)
    assert texts.free() == [0]
    found[2] = [texts.begin(0, PROMPTS[2])[0]]
    for _ in range(4):
        for row, new in texts.write(4).items():
            found[row or 2] += new
    assert {i: len(each) for i, each in found.items()} == {0: 18, 1: 28, 2: 16}  # the second is full: 12 + 28 = 40
    expected = {i: alone(params, config, PROMPTS[i], len(found[i])) for i in found}
    assert found == expected


@pytest.mark.usefixtures("short")
def test_a_text_goes_on_from_what_the_cache_has(path: Path):
    params, config, _ = load_model(path)
    texts = Engine(params, config, ())
    first, read = texts.begin(0, PROMPTS[0])
    assert read == len(PROMPTS[0])
    written = [first, *texts.write(6)[0]]
    texts.end(0)
    following = [*PROMPTS[0], *written[:5], 1, 2, 3]
    token, read = texts.begin(0, following)
    assert read == 3  # the cache has the prompt and the first five tokens
    assert [token, *texts.write(9)[0]] == alone(params, config, following, 10)
    texts.end(0)
    with pytest.raises(ValueError, match="0 tokens; it must have some"):
        texts.begin(0, [])


def test_settings_of_each_text_in_a_batch():
    scores = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
    settings = [Sampling(), Sampling(1.0), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.7), Sampling(1.0, min_p=0.25)]
    arrays = Sampling(*(jnp.array(each, jnp.float32)[:, None] for each in zip(*settings, strict=True)))
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = jax.jit(jax.vmap(lambda key: choose(jnp.tile(scores, (5, 1)), arrays, key)))(keys)
    assert [set(row.tolist()) for row in drawn.T] == [{1}, {0, 1, 2, 3}, {1, 3}, {1, 3}, {1, 2, 3}]


def test_a_token_of_the_text_loses_by_the_penalty():
    scores, seen = jnp.array([[1.0, 2.0, -1.0]]), jnp.array([[False, True, False]])
    penalty = Sampling(repetition=2.5)
    assert choose(scores, Sampling(), jax.random.key(0), seen) == 1
    assert choose(scores, penalty, jax.random.key(0), seen) == 0
    assert choose(-scores, penalty, jax.random.key(0), jnp.array([[True, False, False]])) == 2
    with pytest.raises(ValueError, match="repetition above 0"):
        Sampling(repetition=0).checked()


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


STREAMED = {
    "nothing stops it": ("a fine day", (), ["a fine day"]),
    "a stop in one piece": ("abc END def", (" END",), ["abc"]),
    "the beginning of a stop": ("a <en b <end> c", ("<end>",), ["a <en b "]),
    "the first of two stops": ("one two three", ("three", "two"), ["one "]),
    "letters of several bytes": ("naïve 日本 ✓", (), ["naïve 日本 ✓"]),
    "a stop that never comes whole": ("the en", ("end",), ["the en"]),
}


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("case", STREAMED)
def test_text_that_arrives_in_pieces(case: str, step: int):
    text, stops, expected = STREAMED[case]
    stream, tokens = TextStream(Bytes(), stops), list(text.encode())  # pyright: ignore[reportArgumentType]
    pieces = [stream.add(tokens[at : at + step]) for at in range(0, len(tokens), step)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, stream.end()]) == "".join(expected)
    assert stream.stopped == (text != expected[0])


def test_an_adapter_is_the_same_for_a_file_and_a_folder(tmp_path: Path):
    """A GGUF file has the rows of queries and keys of Llama in another order than the adapter."""
    file, folder = load_model(write_gguf(tmp_path / "m.gguf", "llama", "F32")), write_folder(tmp_path / "f", "llama")
    base = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    adapted = add_lora(base, 2, key=jax.random.key(0), rules=["q_proj", "up_proj"])
    random = np.random.default_rng(0)
    updates = jax.tree.map(lambda x: x if x.ndim == 0 else jnp.float32(random.normal(size=x.shape)), adapted)
    save_adapter(tmp_path / "adapter", updates)
    logits = []
    for model in (file, load_model(folder)):
        params = with_adapter(model, tmp_path / "adapter")
        assert not all(params[name] is model.params[name] for name in params)
        texts = Engine(params, model.config, ())
        logits.append(texts._scores(PROMPTS[0], 0, None)[0])
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-4 * np.ptp(logits[1]))
    assert np.ptp(logits[0] - Engine(file.params, file.config, ())._scores(PROMPTS[0], 0, None)[0]) > 0.01


SHAPES = {
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.1.mlp.up_proj.weight": (96, 64),
}


def test_the_format_of_dense_weights_is_int4_and_that_of_others_is_kept(path: Path, tmp_path: Path):
    dense = write_gguf(tmp_path / "m.gguf", "llama", "F32", layers=1)
    name = "blk.0.ffn_up.weight"
    assert load(dense).params[name].nbytes < load(dense, format="file").params[name].nbytes / 6
    assert load(path).params[name].nbytes == load(path, format="file").params[name].nbytes


def test_text_in_text_out(path: Path):
    model = load(path)
    whole = model.generate("he the he", count=12)
    pieces = list(model.stream("he the he", count=12))
    assert "".join(pieces) == whole
    assert len(pieces) > 2
    assert model.last is not None
    assert (model.last.reason, model.last.tokens, model.last.read_tokens) == ("length", 12, 1)
    stop = whole[4:7]
    assert model.generate("he the he", count=12, stops=[stop]) == whole[: whole.index(stop)]
    assert model.last.reason == "stop"
    next(cut := model.stream([{"role": "user", "content": "he"}]))
    cut.close()
    assert model.last.reason == "closed"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Run a command with these lines as its input: the exit code and what it printed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def call(*argv: object, lines: str = "") -> tuple[int, str, str]:
        answers = iter(lines.splitlines())

        def read(prompt: str) -> str:
            del prompt
            try:
                return next(answers)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)
        with jax.numpy_rank_promotion("allow"):
            code = cli.main([str(each) for each in argv])
        return code, *capsys.readouterr()

    return call


def test_the_command_run_writes_one_answer(command, path: Path):
    code, out, err = command("run", path, "he the he", "--raw", "--max-tokens", 12)
    assert (code, out) == (0, f"{load(path).generate('he the he', count=12)}\n")
    assert "wrote 12" in err
    assert "cut by --max-tokens" in err
    code, out, err = command("run", path, "he", "--system", "the", "--max-tokens", 3, "--json", "--quiet")
    assert (code, err, json.loads(out)["tokens"]) == (0, "", 3)
    code, out, err = command("run", path, "he", "--raw", "--system", "the")
    assert (code, out) == (1, "")
    assert "--system is for answers" in err


def test_a_chat_keeps_what_was_said(command, path: Path, tmp_path: Path):
    file = tmp_path / "talk.json"
    lines = f"he\n\nthe\n/save {file}\n/save {file}\n/nothing\n/reset\nhe\n/exit\nnever"
    code, out, err = command("chat", path, "--max-tokens", 4, "--system", "he the", lines=lines)
    assert code == 0
    assert "never" not in out
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved] == ["system", *["user", "assistant"] * 2]
    printed = [line for line in err.splitlines() if line.startswith("[read")]
    assert len(printed) == 3
    read, of = (int(printed[1].split()[i]) for i in (1, 3))
    assert read < of / 2  # the first turn is not read again
    assert f"{file} exists" in err
    assert "'/nothing' is no command; there are /reset" in err


def test_a_chat_forgets_the_oldest_when_there_is_no_room(command, path: Path):
    talk = "\n".join(["he the he the"] * 4)
    code, out, err = command("chat", path, "--max-tokens", 4, "--context", 96, "--json", lines=talk)
    assert (code, "[forgot 2 messages" in err) == (0, True)
    assert len(json.loads(out)["messages"]) < 8


def test_two_models_on_a_text(command, path: Path, tmp_path: Path):
    """By the definitions, with NumPy; a model and itself are not apart."""
    params, config, tokenizer = load_model(path)
    other = write_gguf(tmp_path / "other.gguf", "llama", "Q4_0", layers=1)
    text, window = tmp_path / "text.txt", 20
    text.write_text("he the " * 20)
    tokens = np.array(tokenizer().encode(text.read_text()))
    windows = tokens[: len(tokens) // window * window].reshape(-1, window)

    def predicted(path: Path) -> np.ndarray:
        found = jax.jit(implicit(functools.partial(forward, config=config)))(load_model(path).params, windows[:, :-1])
        return np.float64(jax.nn.log_softmax(found))

    before, after = predicted(path), predicted(other)
    losses = [-np.take_along_axis(each, windows[:, 1:, None], -1).mean() for each in (before, after)]
    code, out, _ = command("compare", path, other, "--text", text, "--window", window, "--json")
    said = json.loads(out)
    assert (code, said["tokens"]) == (0, windows[:, 1:].size)
    np.testing.assert_allclose(said["perplexity"], np.exp(losses), rtol=1e-4)
    np.testing.assert_allclose(said["divergence"], (np.exp(before) * (before - after)).sum(-1).mean(), rtol=1e-3)
    assert said["same_top"] == pytest.approx((before.argmax(-1) == after.argmax(-1)).mean())
    assert said["divergence"] > 1e-4
    code, out, _ = command("compare", path, path, "--text", text, "--window", window)
    assert "same top token   100.00%" in out
    code, _, err = command("compare", path, path, "--text", text, "--sort", "error")
    assert (code, "give one of them" in err) == (1, True)

    context, following = tokens[:7].tolist(), tokens[7:12].tolist()
    value, likeliest = score.log_likelihood(params, config, context, following)
    assert value == pytest.approx(before[0][np.arange(6, 11), following].sum(), rel=1e-4)
    assert likeliest == bool((before[0][6:11].argmax(-1) == following).all())
