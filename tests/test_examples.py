"""The examples run, do what they say, and are what a newcomer should copy."""

from __future__ import annotations

import re
import runpy
import struct
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eformer.checkpoint import load
from eformer.jaximus import explain, implicit, materialization_error, materialize
from eformer.model import quantize_model
from eformer.ops.quantization import quantize

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def lora():
    """The example's names; a module with rules is run once."""
    return runpy.run_path(str(EXAMPLES / "lora.py"))


def test_lora_runs(lora, capsys):
    lora["main"]()
    out = capsys.readouterr().out
    before, after = (float(number) for number in re.findall(r"loss (?:before|after): +(\S+)", out))
    assert after < before / 20
    assert "LoRA(float32[64, 64], 18,432 bytes)" in out
    assert re.search(r"dot_general +LoRA +\S*multiply +1 +0\n", out)
    assert "materialize" not in out


def integers(shape, dtype="float32", seed=3):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), dtype)


def make(lora, dtype="float32"):
    w, a, b = (integers(shape, dtype, seed) for seed, shape in enumerate([(6, 5), (6, 2), (2, 5)]))
    return lora["LoRA"](w, a, b, alpha=2.0)


@pytest.mark.parametrize(("shape", "dtype"), [((6,), "float32"), ((2, 3, 6), "float32"), ((3, 6), "bfloat16")], ids=str)
def test_lora_product(shape, dtype, lora):
    """Of small integers, so exact in either order."""
    q, x = make(lora, dtype), integers(shape, dtype)
    with materialization_error():
        actual = x @ q
    expected = x @ q.materialize()
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)
    assert explain(jnp.matmul)(x, q).dense_bytes == 0


@pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")
def test_lora_other_layouts_are_materialized(lora):
    q, x = make(lora), jnp.ones((3, 5))
    np.testing.assert_array_equal(implicit(lambda x, q: x @ q.T)(x, q), x @ q.materialize().T)
    np.testing.assert_array_equal(q @ x.T, q.materialize() @ x.T)


def test_lora_trains_only_the_adapter(lora):
    q, x = make(lora), jnp.ones((3, 6))
    trained = lora["train"](q, x, jnp.zeros((3, 5)), rate=1.0)
    np.testing.assert_array_equal(trained.w, q.w)
    assert jnp.any(trained.a != q.a)
    assert jnp.any(trained.b != q.b)


def test_adam_in_8_bits(capsys):
    example = runpy.run_path(str(EXAMPLES / "adam8bit.py"))
    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        example["main"](steps=60)
    found = re.findall(r"loss (\S+) after 60 steps, state of (\S+) bytes", capsys.readouterr().out)
    (exact, size), (rounded, small) = ((float(loss), int(size.replace(",", ""))) for loss, size in found)
    assert abs(rounded - exact) < 0.05 * exact
    assert small < 0.28 * size  # 8 bits and a scale for every 64, of 32


@pytest.mark.parametrize(
    "wrap",
    [
        lambda adam: optax.MultiSteps(adam, 2),
        lambda adam: optax.masked(adam, lambda params: jax.tree.map(lambda _: True, params)),
        lambda adam: optax.chain(
            optax.clip_by_global_norm(1.0), optax.apply_if_finite(adam, 2), optax.add_decayed_weights(0.1)
        ),
    ],
    ids=["MultiSteps", "masked", "chain"],
)
def test_transformations_of_optax_take_a_quantized_state(wrap):
    """And a tree of parameters with None where leaves are frozen."""
    optimizer = wrap(runpy.run_path(str(EXAMPLES / "adam8bit.py"))["adam8bit"](0.1))
    params = {"w": jnp.ones((64, 64)), "frozen": None}
    with jax.numpy_dtype_promotion("standard"):
        start = optimizer.init(params)
        _, state = jax.jit(optimizer.update)(params, start, params)
        updates, state = jax.jit(optimizer.update)(params, state, params)
    assert jax.tree.structure(state) == jax.tree.structure(start)
    assert jnp.all(updates["w"] != 0)


def test_demo_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / "demo.py"), run_name="__main__")
    assert stopped.value.code == 0
    assert "usage: eformer demo" in capsys.readouterr().out


@pytest.fixture(scope="module")
def as_outside():
    """The examples are run as a newcomer runs them, and Optax promotes integers."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


# --- stories15M, at small size ---


@pytest.fixture(scope="module")
def stories_file(tmp_path_factory):
    """A model in the format of llama2.c, with its tokenizer: 32 wide, two layers of two heads, 16 positions."""
    draw = np.random.default_rng(0).standard_normal
    pieces = [
        b"<unk>",
        b"<s>",
        b"</s>",
        *(b"<0x%02X>" % byte for byte in range(256)),
        *(bytes([byte]) for byte in range(32, 127)),
    ]
    pieces += [b"On", b"ce"]
    square, up, down = (2, 32, 32), (2, 64, 32), (2, 32, 64)
    shapes = [(len(pieces), 32), (2, 32), *[square] * 4, (2, 32), up, down, up, (32,), (16, 16)]
    weights = [draw(shape) / 6 if len(shape) == 3 else 1 + draw(shape) / 9 for shape in shapes]
    weights[0] -= 1
    tokens = [struct.pack("<fi", number, len(piece)) + piece for number, piece in enumerate(pieces)]
    path = tmp_path_factory.mktemp("stories") / "llama2.data"
    header = struct.pack("<7i", 32, 64, 2, 2, 2, len(pieces), 16)
    path.write_bytes(header + b"".join(w.astype("<f4").tobytes() for w in weights) + b"\0" * 4 + b"".join(tokens))
    return path


@pytest.fixture(scope="module")
def told(stories_file, as_outside):
    del as_outside
    from eformer.examples import distillation, stories

    model = stories.read_stories(stories_file)
    text = distillation.tell(model.params, model.sizes, stories_file.parent / "text", 4, 4, 64, seed=0)
    return distillation, stories, model, text


def test_stories_tokens(told):
    *_, model, _ = told
    numbers = model.tokenizer.encode("Once: \N{SNOWMAN}")
    assert [model.tokenizer.pieces[n] for n in numbers[:4]] == [b" ", b"On", b"ce", b":"]
    assert model.tokenizer.decode([1, *numbers]) == "Once: \N{SNOWMAN}"


def test_stories_are_sampled_from_what_the_model_predicts(told):
    _, stories, model, text = told
    _, states = stories.layers(model.params, model.params["embed"][text.tokens], heads=2)
    np.testing.assert_allclose(np.moveaxis(text.states, 2, 0), states, rtol=2e-3, atol=2e-3)  # float16
    assert np.isin(text.tokens[:, 1:], text.vocabulary).all()
    begin = jnp.asarray(text.tokens[:, :2])
    likeliest, _ = stories.sample(model.params, begin, jax.random.key(0), heads=2, length=16, temperature=0.0)
    scores = stories.logits(model.params, likeliest, heads=2)
    np.testing.assert_array_equal(likeliest[:, 2:], jnp.argmax(scores, axis=-1)[:, 1:-1])


@pytest.mark.parametrize(("format", "relative"), [("ternary", False), ("int4", True), ("nf4", True)])
def test_a_stopped_run_continues_as_if_it_had_not_stopped(format, relative, told, tmp_path):
    distillation, _, model, text = told
    student = distillation.student_of(model.params, format, None, False, 0)
    run = distillation.Run(student, model.params, text, 2, 1e-3, relative)
    run.steps, path = 4, tmp_path / "training.safetensors"

    def two_steps():
        some = distillation.batches(4, 2, 0, run.step)
        losses = [run.advance(next(some)) for _ in range(2)]
        return losses, jax.tree.map(np.asarray, (run.trained, run.adam))

    two_steps()
    run.save(path)
    losses, end = two_steps()
    run.resume(path)
    losses_again, end_again = two_steps()
    assert losses == losses_again
    jax.tree.map(np.testing.assert_array_equal, end, end_again)
    assert np.any(end[0]["gate.weight"] != model.params["gate.weight"])


def test_a_relative_rate_is_of_the_magnitude_of_each_layer(told):
    distillation, _, model, text = told
    student = distillation.student_of(model.params, "int4", None, False, 0)
    before = {name: np.asarray(leaf) for name, leaf in student.trained.items() if leaf is not None}
    run = distillation.Run(student, model.params, text, 2, 1e-3, relative=True)
    run.advance(np.arange(2))
    warm = 1e-3 / distillation.WARM_UP  # the first step of Adam is the rate, whatever the gradient
    for name, leaf in before.items():
        axes = tuple(range(1 if leaf.ndim > 1 else 0, leaf.ndim))
        moved = np.max(np.abs(np.asarray(run.trained[name]) - leaf), axes)
        np.testing.assert_allclose(moved, warm * np.mean(np.abs(leaf), axes), rtol=0.02)


def test_loftq_starts_nearer_to_the_teacher(told):
    distillation, _, model, text = told
    found = {}
    for loftq in (False, True):
        student = distillation.student_of(model.params, "nf4", 4, loftq, 0)
        params = student.params(student.trained, student.frozen)
        given = (text.tokens, jnp.asarray(text.states), model.params, text.vocabulary, 2)
        found[loftq] = float(implicit(distillation.loss)(params, *given)[0])
    assert 0 < found[True] < found[False]


def test_scales_that_are_codes_are_trained_as_numbers(told):
    """Each block has a gradient, and the forward pass sees the values of the quantized model, bit for bit."""
    distillation, _, model, text = told
    student = distillation.student_with_codes(quantize_model(model.params, distillation.rules("nf4")))
    trained = [leaf * 1.1 for leaf in student.trained]
    params, final = student.params(trained, student.frozen), student.final(trained, student.frozen)
    jax.tree.map(np.testing.assert_array_equal, params, dict(materialize(final)))
    assert final["gate.weight"].absmax.dtype == jnp.uint8
    given = (text.tokens, jnp.asarray(text.states), model.params, text.vocabulary, 2)
    gradients = jax.grad(lambda trained: distillation.loss(student.params(trained, student.frozen), *given)[0])(trained)
    assert (2, 64, 4) in [leaf.shape for leaf in gradients]  # of the gate: 32 columns are 4 blocks
    assert all(jnp.all(leaf != 0) for leaf in gradients)


@pytest.mark.usefixtures("as_outside")
def test_distillation_runs(stories_file, tmp_path, monkeypatch, capsys):
    from eformer.examples import distillation

    text = tmp_path / "stories.txt"
    text.write_text("\nOnce upon a time." * 3)
    sizes = {"steps": 2, "every": 1, "stories": 2, "at-once": 2, "batch": 1, "vocabulary": 32, "told": 2}
    options = {"text": text, "out": tmp_path / "out", **sizes}
    given = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["distillation.py", str(stories_file), *given])
    distillation.main()
    out = capsys.readouterr().out
    assert re.findall(r"step (\d) of 2, .* perplexity \d", out) == ["0", "1", "2"]
    assert out.count("Once upon") == 3
    folder = tmp_path / "out" / "ternary"
    assert load(folder / "model.safetensors")["gate.weight"].scale.shape == (2, 1, 1)
    assert (folder / "curve.csv").read_text().count("\n") == 4
    assert "float32, perplexity" in (folder / "stories.txt").read_text()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--batch=2"])
    with pytest.raises(SystemExit, match=r"began with other settings: --batch was 1, and is 2\. Give another --out"):
        distillation.main()


@pytest.mark.usefixtures("as_outside")
def test_scales_are_trained_after_the_weights(stories_file, tmp_path, monkeypatch, capsys):
    """Codes and the embedding stay as they are, and time goes on from the run before."""
    from eformer.examples import distillation

    sizes = {"steps": 2, "every": 1, "stories": 2, "at-once": 2, "batch": 1, "vocabulary": 32, "told": 2}
    given = [f"--{name}={value}" for name, value in {"format": "nf4", "out": tmp_path / "out", **sizes}.items()]
    monkeypatch.setattr(sys, "argv", ["distillation.py", str(stories_file), *given, "--scales"])
    with pytest.raises(SystemExit):
        distillation.main()
    assert "train without it first" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", sys.argv[:-1])
    distillation.main()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--scales"])
    distillation.main()
    before, after = (load(tmp_path / "out" / name / "model.safetensors") for name in ("nf4", "nf4-scales"))
    for name in ("gate.weight", "down.weight"):
        assert jnp.array_equal(before[name].packed, after[name].packed)
        assert after[name].absmax.dtype == before[name].absmax.dtype == jnp.uint8
        assert not jnp.array_equal(before[name].materialize(), after[name].materialize())
    assert jnp.array_equal(before["embed"], after["embed"])
    rows = [distillation.read_rows(tmp_path / "out" / name / "curve.csv") for name in ("nf4", "nf4-scales")]
    assert rows[1][0]["cpu_minutes"] >= rows[0][-1]["cpu_minutes"]


@pytest.mark.usefixtures("as_outside")
def test_classifier_runs(monkeypatch, capsys):
    names = runpy.run_path(str(EXAMPLES / "qat_classifier.py"))
    command = ["qat_classifier.py", "--format", "float32", "--format", "ternary", "--steps", "60", "--width", "64"]
    monkeypatch.setattr(sys, "argv", command)
    names["main"]()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["float32", "ternary"]
    assert int(rows[1][1].replace(",", "")) < int(rows[0][1].replace(",", ""))
    rounded, trained = (float(each.rstrip("%")) for each in rows[1][2:])
    assert trained > max(rounded, 100 / 3)


@pytest.mark.parametrize(
    "form", ["int8", "int4", "int4,symmetric=true", "int4,block_size=16,double_quantization=false"]
)
def test_onnx_runtime_multiplies_by_the_same_values(form: str, tmp_path: Path):
    """Bits of sums differ, and nothing else: float32 sums of 64 in another order."""
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: pip install onnx onnxruntime")
    pytest.importorskip("onnx")
    example = runpy.run_path(str(EXAMPLES / "onnx_export.py"))
    random = np.random.default_rng(0)
    weights = [random.normal(size=shape).astype(np.float32) for shape in ((64, 96), (96, 32))]
    layers = [(quantize(w, form), random.normal(size=w.shape[1]).astype(np.float32)) for w in weights]
    example["save_mlp"](tmp_path / "m.onnx", layers)
    x = random.normal(size=(3, 64)).astype(np.float32)
    (found,) = runtime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x})
    (up, up_bias), (down, down_bias) = ((np.asarray(q.materialize()), bias) for q, bias in layers)
    expected = np.maximum(x @ up + up_bias, 0) @ down + down_bias
    np.testing.assert_allclose(found, expected, rtol=0, atol=96 * 2.0**-23 * np.ptp(expected))
    with pytest.raises(ValueError, match="along the rows fits"):
        example["parts"](quantize(weights[0], "int4", axis=-1))


def test_a_vision_model_in_a_format(capsys, monkeypatch):
    """Its convolution, attention and MLP are quantized: more than half of the bytes are gone."""
    with jax.numpy_rank_promotion("allow"):
        example = runpy.run_path(str(EXAMPLES / "vision.py"))
        monkeypatch.setitem(example["main"].__globals__, "FORMATS", ("int8",))
        monkeypatch.setitem(example["main"].__globals__, "SECONDS", 0)
        with materialization_error():
            example["main"](["--size", "32", "--width", "64", "--layers", "1", "--classes", "100"])
    _, dense, small = capsys.readouterr().out.splitlines()
    assert float(small.split()[1]) < float(dense.split()[1]) / 2
    assert 0 < float(small.split()[3].rstrip("%")) < 5
