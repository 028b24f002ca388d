"""GGUF: golden blocks everywhere, the `gguf` package where it is installed, and a real file if one is given."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from quantization.cases import assert_same_leaves, assert_within, normal

from eformer._src.checkpoint import placement
from eformer._src.checkpoint.gguf import codecs
from eformer._src.checkpoint.gguf.codecs import CODECS
from eformer._src.checkpoint.gguf.encode import ENCODERS
from eformer._src.checkpoint.gguf.types import GRIDS, GROUPED, IDS, TYPES
from eformer._src.kernels import cpu
from eformer.checkpoint import CheckpointError, DecodedWarning, convert, load, open_checkpoint, save_gguf
from eformer.model import NonfiniteWarning
from eformer.ops.quantization import Array1B, ArrayGrouped, QuantizedArray, quantize

from .files import gguf_bytes, safetensors_file, text

GOLDEN = Path(__file__).with_name("blocks.gguf")


def bits(x: Any) -> np.ndarray:
    """float32 as integers, with one NaN for all."""
    x = np.asarray(x)
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


def dense(x: Any) -> np.ndarray:
    return np.asarray(x.materialize() if isinstance(x, QuantizedArray) else x)


@pytest.mark.parametrize("name", [name for name in GROUPED if name not in ("NVFP4", "Q1_0", "Q2_0")] + ["IQ2_XXS"])
def test_blocks_stay_quantized_bit_for_bit(name: str):
    with open_checkpoint(GOLDEN) as golden:
        assert golden.info(name).format == name
        found, expected = golden[name], golden[f"expected.{name}"]
    assert isinstance(found, ArrayGrouped)
    assert np.array_equal(bits(found.materialize()), bits(expected))


def test_other_blocks_decode_with_the_package_and_say_so_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(CODECS, ("IQ2_XXS", ArrayGrouped))
    pytest.importorskip("gguf", reason="decodes what is not kept quantized")
    with open_checkpoint(GOLDEN) as golden:
        with pytest.warns(DecodedWarning, match=r"blocks\.gguf.*IQ2_XXS.*float32"):
            found = golden["IQ2_XXS"]
        assert np.array_equal(golden["IQ2_XXS"], found)
        assert np.array_equal(found, golden["expected.IQ2_XXS"])


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with open_checkpoint(GOLDEN) as golden, pytest.raises(CheckpointError, match="pip install gguf"):
        golden["IQ2_XXS"]


def test_metadata():
    with open_checkpoint(GOLDEN) as golden:
        assert golden.kind == "gguf"
        assert golden.metadata == {
            "general.architecture": "golden",
            "numbers": [1, 2, 3],
            "words": ["a", "bc", ""],
            "fraction": 0.25,
            "truth": True,
        }


PLAIN = ["float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64"]


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4, 5), (0, 3)], ids=str)
def test_dense_arrays_come_back(dtype: str, shape: tuple[int, ...], tmp_path: Path):
    x = np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    found = np.asarray(load(save_gguf(tmp_path / "a.gguf", {"x": x}))["x"])
    assert (found.dtype, found.shape, found.tobytes()) == (x.dtype, x.shape, x.tobytes())


METADATA = {
    "text": "é",
    "small": 7,
    "negative": -3,
    "large": 2**40,
    "low": -(2**40),
    "half": 0.5,
    "no": False,
    "list": [1, 2],
    "mixed": [-1, 2**40],
    "words": ["a", ""],
    "empty": [],
    "nested": [[1], [2, 3]],
    "own": np.float32(0.5),
}


def test_metadata_comes_back(tmp_path: Path):
    path = save_gguf(tmp_path / "a.gguf", {}, metadata=METADATA)
    assert open_checkpoint(path).metadata == METADATA


def test_metadata_keeps_its_types_from_file_to_file(tmp_path: Path):
    """Python has one type of integers and one of floats; whoever reads the file next may want another."""
    typed = {"a": np.float32(0.1), "b": np.float64(0.1), "c": np.uint8(3), "d": [np.int8(-1), np.int8(2)], "e": True}
    first = save_gguf(tmp_path / "a.gguf", {}, metadata=typed)
    second = convert(first, tmp_path / "b.gguf", "gguf")
    assert second.read_bytes() == first.read_bytes()
    with open_checkpoint(first) as checkpoint:
        checkpoint.metadata["c"] = -5  # pyright: ignore[reportIndexIssue]  # it is a dict
        third = save_gguf(tmp_path / "c.gguf", {}, metadata=checkpoint.metadata)
    assert open_checkpoint(third).metadata["c"] == -5


TYPED = {
    "u8": np.uint8(3),
    "i64": np.int64(-7),
    "u64": np.uint64(2**64 - 1),
    "f32": np.float32(0.1),
    "f64": 0.1,
    "inf": np.float32("inf"),
    "yes": True,
    "text": "bad \udcff utf-8",
    "empty": [],
    "bytes": list(np.arange(4, dtype=np.int8)),
    "floats": list(np.array([0.1, 0.2], np.float32)),
    "texts": ["a", "", "\u00e9"],
    "total_size": 5,
}


def header_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: data.index(text("w"))]


@pytest.mark.parametrize("shards", [None, 100], ids=["one file", "shards"])
def test_metadata_keeps_its_types_through_safetensors(shards: int | None, tmp_path: Path):
    w, typed = {"w": np.ones((4, 32), np.float32), "v": np.ones(32, np.float32)}, {**TYPED, "nested": [[1], ["a"]]}
    source = save_gguf(tmp_path / "a.gguf", w, metadata=typed)
    between = convert(source, tmp_path / "b", "safetensors", max_shard_bytes=shards)
    assert open_checkpoint(between).metadata == open_checkpoint(source).metadata
    again = convert(between, tmp_path / "c.gguf", "gguf")
    assert header_of(again) == header_of(source)


def test_lists_of_lists_keep_their_types(tmp_path: Path):
    inner = b"".join(struct.pack("<IQ", kind, 1) + data for kind, data in ((0, b"\x07"), (6, struct.pack("<f", 0.5))))
    pairs = text("n") + struct.pack("<IIQ", 9, 9, 2) + inner
    (tmp_path / "a.gguf").write_bytes(gguf_bytes(("w", (32,), 0, 0), pairs=pairs, count=1, data=128))
    between = convert(tmp_path / "a.gguf", tmp_path / "b.safetensors", "safetensors")
    assert open_checkpoint(between).metadata == {"n": [[7], [0.5]]}
    assert header_of(convert(between, tmp_path / "c.gguf", "gguf")) == header_of(tmp_path / "a.gguf")


LYING = {"base64": "!", "cut": "AQAAAAAAAAA=", "too many": "//////////8=", "empty": "AA=="}


@pytest.mark.parametrize("value", LYING.values(), ids=LYING)
def test_metadata_inside_safetensors_that_lies(value: str):
    with pytest.raises(CheckpointError, match=r"the metadata `eformer\.gguf` can't be read"):
        open_checkpoint(safetensors_file({"w": np.ones(3, np.float32)}, {"eformer.gguf": value}))


# --- a model in parts ---


def parts_of_model(folder: Path, changes: dict[int, dict[str, Any]] | None = None, count: int = 3) -> list[Path]:
    """A model in parts, as llama-gguf-split names and describes them."""
    paths = []
    for i in range(count):
        said = {"split.no": np.uint16(i), "split.count": np.uint16(count), "split.tensors.count": np.int32(count)}
        more = {"general.architecture": "x", "split.tensors.count": np.int32(count)} if i == 0 else {}
        metadata = {**said, **more, **(changes or {}).get(i, {})}
        paths.append(folder / f"m-{i + 1:05}-of-{count:05}.gguf")
        save_gguf(paths[-1], {f"w{i}": np.full((2, 32), i, np.float32)}, metadata=metadata)
    return paths


@pytest.mark.parametrize("which", [0, 1, 2, None], ids=["first", "second", "last", "folder"])
def test_a_model_in_parts_is_read_whole(which: int | None, tmp_path: Path):
    paths = parts_of_model(tmp_path)
    with open_checkpoint(tmp_path if which is None else paths[which]) as checkpoint:
        assert list(checkpoint) == ["w0", "w1", "w2"]
        assert all(np.all(checkpoint[f"w{i}"] == i) for i in range(3))
        assert checkpoint.metadata == {"general.architecture": "x"}
    whole = convert(paths[0], tmp_path / "to" / "whole.gguf", "gguf")
    assert open_checkpoint(whole).metadata == {"general.architecture": "x"}


def missing(paths: list[Path]) -> Path:
    paths[1].unlink()
    return paths[0]


def renamed(paths: list[Path]) -> Path:
    return paths[0].rename(paths[0].with_name("model.gguf"))


def swapped(paths: list[Path]) -> Path:
    paths[2].write_bytes(paths[1].read_bytes())
    return paths[0]


PARTS: dict[str, tuple[dict[int, dict[str, Any]], Callable[[list[Path]], Any], str]] = {
    "missing": ({}, missing, r"one of 3 parts of a model, and 'm-00002-of-00003\.gguf' is not beside it"),
    "another name": ({}, renamed, r"is not named as they are: NAME-00001-of-00003\.gguf"),
    "bytes": ({}, lambda paths: paths[0].read_bytes(), "is not named as they are"),
    "the same twice": ({}, swapped, "says that it is part 1 .*its name that it is part 2 of 3"),
    "another count": ({1: {"split.count": np.uint16(2)}}, lambda paths: paths[0], "part 1 .* of 2"),
    "too many": ({0: {"split.tensors.count": np.int32(4)}}, lambda paths: paths[0], "have 3 tensors, .* says 4"),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_not_a_whole_are_refused(name: str, tmp_path: Path):
    changes, change, words = PARTS[name]
    source = change(parts_of_model(tmp_path, changes))
    with pytest.raises(CheckpointError, match=words):
        load(source)


@pytest.mark.parametrize("value", [None, {"a": 1}, [1, "a"], 2**70, 1j], ids=repr)
def test_metadata_that_gguf_has_not_is_refused(value: Any, tmp_path: Path):
    with pytest.raises(TypeError, match="the metadata 'x'"):
        save_gguf(tmp_path / "a.gguf", {}, metadata={"x": value})


# The largest error of a block by its largest magnitude: half a step, but for the clipped end of Q4_0, which is a whole
# one; and scales are rounded to float16. Q4_1 has 15 steps for twice the magnitude, and a float16 minimum.
STEP = {"Q8_0": 0.5 / 127, "Q4_0": 1 / 8, "Q4_1": 1 / 15 + 2.0**-10, "TQ2_0": 0.5}


@pytest.mark.parametrize("kind", STEP)
def test_blocks_are_as_near_as_they_can_be(kind: str, tmp_path: Path):
    x = np.array(normal((5, 512)))
    x[0, :256] = 0
    found = dense(load(save_gguf(tmp_path / "a.gguf", {"x": x}, type=kind))["x"])
    size = TYPES[IDS[kind]].elements
    peak = np.repeat(np.abs(x).reshape(-1, size).max(1), size).reshape(x.shape)
    assert_within(found, x, peak * (STEP[kind] + 2.0**-11 + 2.0**-22) + 2.0**-24)
    assert np.all(found[0, :256] == 0)


# The root of the mean squared error by the largest magnitude: half a step of a block, and what changes when its scale
# and minimum are rounded to 8 bits (Q6_K) or 6 bits (Q4_K) of the largest. Later steps only make it less.
MEAN = {"Q6_K": (0.5 + 32 / 254) / 32, "Q4_K": (0.5 + 15 / 126) * 2 / 15 + 1 / 126}


@pytest.mark.parametrize("kind", MEAN)
def test_superblocks_are_near_on_average(kind: str, tmp_path: Path):
    x = np.array(normal((9, 512))) * np.exp2(np.arange(-4.0, 5.0, dtype=np.float32))[:, None]
    x[0, :256], x[1], x[2], x[3] = 0, np.abs(x[1]), -np.abs(x[2]), 1.5
    found = dense(load(save_gguf(tmp_path / "a.gguf", {"x": x}, type=kind))["x"])
    error = np.sqrt(np.mean(np.square(found - x).reshape(-1, 256), axis=1))
    peak = np.max(np.abs(x).reshape(-1, 256), axis=1)
    assert np.all(error <= peak * (MEAN[kind] + 2.0**-10))
    assert np.all(found[0, :256] == 0)


def test_q4_k_is_nearer_than_q4_1_in_fewer_bits(tmp_path: Path):
    x = np.array(normal((16, 512)))
    found = {kind: dense(load(save_gguf(tmp_path / kind, {"x": x}, type=kind))["x"]) for kind in ("Q4_K", "Q4_1")}
    error = {kind: np.sum(np.square(y - x)) for kind, y in found.items()}
    assert error["Q4_K"] < 0.9 * error["Q4_1"]


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_block_with_a_nan_is_not_finite(kind: str, bad: float, tmp_path: Path):
    x = np.ones((1, 512), np.float32)
    x[0, 3] = bad
    with pytest.warns(NonfiniteWarning, match="'x' holds .*1 .*becomes NaN"):
        found = dense(load(save_gguf(tmp_path / "a.gguf", {"x": x}, type=kind))["x"])
    assert not np.isfinite(found[0, 3])
    assert_within(found[0, 256:], np.ones(256), 2.0**-11)  # the scale is rounded to float16


@pytest.mark.parametrize("kind", ["F16", *ENCODERS])
def test_values_beyond_float16_are_refused(kind: str, tmp_path: Path):
    with pytest.raises(ValueError, match=r"'x' has values up to 1e\+09, which .* can't hold"):
        save_gguf(tmp_path / "a.gguf", {"x": np.full((1, 256), 1e9, np.float32)}, type=kind)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["F16", *ENCODERS])
def test_values_below_float16_are_refused(kind: str, tmp_path: Path):
    """Scales would be 0, and with them all values."""
    with pytest.raises(ValueError, match=r"'x' has values up to 1e-09, which .* can't hold"):
        save_gguf(tmp_path / "a.gguf", {"x": np.full((1, 256), 1e-9, np.float32)}, type=kind)
    x = np.ones((2, 256), np.float32) * [[1], [1e-9]]
    assert load(save_gguf(tmp_path / "a.gguf", {"x": x.astype(np.float32)}, type=kind)).keys() == {"x"}


def types(path: Path) -> dict[str, str]:
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.info(name).format or checkpoint.info(name).dtype.name for name in checkpoint}


def test_types_by_default(tmp_path: Path):
    ones = jnp.ones((4, 256), jnp.int8)
    tree = {
        "ternary": Array1B.quantize(ones, scale=jnp.full((4, 1), 0.5), dtype=jnp.float32),
        "bias": jnp.ones(64, jnp.bfloat16),
    }
    path = save_gguf(tmp_path / "a.gguf", tree)
    assert types(path) == {"ternary": "TQ2_0", "bias": "bfloat16"}
    assert np.all(dense(load(path)["ternary"]) == 0.5)


TENTHS = Array1B.quantize(jnp.ones((4, 256), jnp.int8), scale=jnp.full((4, 1), 0.1), dtype=jnp.float32)
ROUNDED: dict[str, tuple[QuantizedArray, str | None, str]] = {
    "int8": (quantize(normal((4, 64)), dtype="int8"), None, "`type='Q8_0'` rounds them.*`type='F32'`"),
    "nf4": (quantize(normal((4, 64)), dtype="nf4"), None, "`type='Q8_0'` rounds them"),
    "ragged": (quantize(normal((6, 10)), dtype="int8"), None, "rows of 10 are no multiple of the 32 .* F16, F32"),
    "a scale of more digits": (TENTHS, None, "'TQ2_0'` rounds"),
    "rows of another length": (
        quantize(normal((4, 64)), dtype="int4"),
        "Q4_K",
        "rows of 64 are no multiple of the 256 elements of a Q4_K block; `type` may be Q8_0, Q4_0, Q4_1, F16, F32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDED)
def test_nothing_is_rounded_unasked(name: str, tmp_path: Path):
    q, kind, words = ROUNDED[name]
    with pytest.raises(ValueError, match=words):
        save_gguf(tmp_path / "a.gguf", {"w": q}, type=kind)
    assert not list(tmp_path.iterdir())


def test_types_that_are_asked_for(tmp_path: Path):
    tree = {"w": np.ones((4, 64), np.float32), "b": np.ones(64, np.float32), "r": np.ones((2, 3), np.float32)}
    assert types(save_gguf(tmp_path / "a.gguf", tree, type="Q4_0")) == {"w": "Q4_0", "b": "float32", "r": "float32"}
    chosen = save_gguf(tmp_path / "b.gguf", tree, type=lambda name, shape: {"w": "Q8_0", "b": "F16"}.get(name))
    assert types(chosen) == {"w": "Q8_0", "b": "float16", "r": "float32"}


@pytest.mark.parametrize(
    ("tree", "kind", "error", "match"),
    [
        ({"w": np.ones((2, 256))}, "Q3_K", ValueError, "'Q3_K' can't be written"),
        ({"w": quantize(normal((2, 256)), format="int4")}, None, ValueError, "'w' is a ArrayGrouped.*say by `type`"),
        ({"w": np.ones((2, 33))}, lambda name, shape: "Q8_0", ValueError, "rows of 33"),
        ({"w": np.ones((2, 2), bool)}, None, TypeError, "'w' is bool"),
        ({"w" * 64: np.ones(1)}, None, ValueError, "names up to 63 bytes"),
        ({"w": np.ones((1,) * 5)}, None, ValueError, "4 axes"),
        ({"w": np.ones((2, 2), np.int8)}, lambda name, shape: "F32", TypeError, "can't be written as F32"),
    ],
)
def test_what_gguf_has_not_is_refused(tree: Any, kind: Any, error: type[Exception], match: str, tmp_path: Path):
    with pytest.raises(error, match=match):
        save_gguf(tmp_path / "a.gguf", tree, type=kind)
    assert not list(tmp_path.iterdir())


# --- the package itself ---


def test_our_table_of_types_is_the_packages():
    gguf = pytest.importorskip("gguf", reason="the judge of the format")
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    shared = TYPES.keys() & theirs.keys()
    assert len(shared) > 30
    assert {number: tuple(TYPES[number]) for number in shared} == {number: theirs[number] for number in shared}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *STEP])
def test_the_package_reads_and_writes_the_same_bytes(kind: str, tmp_path: Path):
    gguf = pytest.importorskip("gguf", reason="the judge of the format")
    x = np.array(normal((7, 512)))
    x[2, :256] = 0
    metadata = {"general.architecture": "test", "list": [1, 2], "f": 0.5}
    reader = gguf.GGUFReader(save_gguf(tmp_path / "a.gguf", {"x": x, "y": x[0]}, type=kind, metadata=metadata))
    tensor = reader.tensors[0]
    assert (tensor.name, tensor.tensor_type.name, tensor.shape.tolist()) == ("x", kind, [512, 7])
    assert tensor.data.tobytes() == gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind]).tobytes()
    assert reader.get_field("general.architecture").contents() == "test"
    assert reader.get_field("list").contents() == [1, 2]


BLOCKS = [kind.name for kind in TYPES.values() if kind.elements > 1]
# Types, and shapes whose last axis is in blocks.
RANDOM = [(kind, (3, 2)) for kind in BLOCKS] + [("Q3_K", shape) for shape in [(2,), (1,), (2, 3, 1)]]


def random_file(kind: str, shape: tuple[int, ...]) -> tuple[bytes, np.ndarray]:
    """A file with a tensor "x" of random bytes, many of whose scales are huge or no numbers; and its blocks."""
    form = TYPES[IDS[kind]]
    blocks = np.random.default_rng(0).integers(0, 256, (math.prod(shape), form.bytes), np.uint8)
    if kind == "NVFP4":
        blocks[:, :4] %= 127  # others are tested below
    if kind == "MXFP4":
        blocks[:, 0] = np.clip(blocks[:, 0], 2, 254)  # less is below the smallest float32 that XLA has; 255 is refused
    axes = (shape[-1] * form.elements, *shape[-2::-1])
    return gguf_bytes(("x", axes, IDS[kind], 0), data=0) + blocks.tobytes(), blocks


def ones(blocks: np.ndarray) -> np.ndarray:
    """Q1_0: a bit for each element, the lowest first, of d or -d."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") == 1, d, -d)


def twos(blocks: np.ndarray) -> np.ndarray:
    """Q2_0: two bits for each element, the lowest first, less one, times d."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    codes = blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return (codes.reshape(len(blocks), -1).astype(np.float32) - 1) * d


BY_HAND = {"Q1_0": ones, "Q2_0": twos}  # that the package does not decode


@pytest.mark.parametrize("kind", BY_HAND)
def test_types_that_the_package_does_not_know(kind: str):
    file, blocks = random_file(kind, (3, 2))
    with np.errstate(all="ignore"):
        expected = BY_HAND[kind](blocks)
    found = load(file)["x"]
    assert isinstance(found, ArrayGrouped)
    assert np.array_equal(bits(dense(found)).reshape(-1), bits(expected).reshape(-1))


def test_scales_of_nvfp4_have_no_sign_and_no_nan():
    blocks = np.full((1, 36), 0x22, np.uint8)  # every element is 1
    blocks[0, :4] = 0x38, 0xB8, 0x7F, 0x80
    header = gguf_bytes(("x", (64,), IDS["NVFP4"], 0), data=0)
    assert np.array_equal(dense(load(header + blocks.tobytes())["x"]), np.repeat([1.0, 1, 0, 0], 16))
    blocks[0, 0] = 0xFF
    with pytest.raises(CheckpointError, match="480 in ggml"):
        load(header + blocks.tobytes())


def test_codes_that_q1_0_has_not_are_not_written(tmp_path: Path):
    q = load(random_file("Q1_0", (3, 2))[0])["x"]
    q = dataclasses.replace(q, packed=q.packed | 1)
    with pytest.raises(ValueError, match="Q1_0 has the codes 0 and 2 alone"):
        save_gguf(tmp_path / "a.gguf", {"x": q})


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_not_written_unasked(name: str, tmp_path: Path):
    pytest.importorskip("gguf", reason="has the grids")
    q = load(random_file(name, (3, 2))[0])["x"]
    assert isinstance(q, ArrayGrouped)
    with pytest.raises(ValueError, match="no type of GGUF holds this layout of it"):
        save_gguf(tmp_path / "a.gguf", {"x": q})


PACKAGED = [(kind, shape) for kind, shape in RANDOM if kind not in BY_HAND]


@pytest.mark.parametrize(("kind", "shape"), PACKAGED, ids=str)
@pytest.mark.filterwarnings("ignore::eformer.checkpoint.DecodedWarning")
def test_random_blocks(kind: str, shape: tuple[int, ...]):
    """Whatever the bytes are: what the package makes of them, or an error of ours where it makes nothing."""
    gguf = pytest.importorskip("gguf", reason="the judge of the format")
    file, blocks = random_file(kind, shape)
    with np.errstate(all="ignore"):
        try:
            expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
        except NotImplementedError:
            with pytest.raises(CheckpointError, match="does not decode its type"):
                load(file)
        else:
            found = load(file)["x"]
            assert found.shape == (*shape[:-1], shape[-1] * TYPES[IDS[kind]].elements)
            assert np.array_equal(bits(dense(found)).reshape(-1), bits(expected).reshape(-1))


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)], ids=str)
def test_empty_arrays_stay_quantized(shape: tuple[int, ...], tmp_path: Path):
    found = load(random_file("Q3_K", shape)[0])["x"]
    assert isinstance(found, ArrayGrouped)
    assert_same_leaves(load(save_gguf(tmp_path / "a.gguf", {"x": found}))["x"], found)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 1, 7), (0, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("kind", GROUPED)
def test_the_core_reads_blocks_as_numpy_does(kind: str, shape: tuple[int, ...]):
    file, _ = random_file(kind, shape)
    found = load(file)["x"]
    with cpu.use_core(False):
        assert_same_leaves(found, load(file)["x"])


def test_many_blocks_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "a.gguf"
    path.write_bytes(random_file("Q4_K", (7, 33))[0])
    whole = load(path)["x"]
    monkeypatch.setattr(codecs, "AT_ONCE", 1000)
    assert_same_leaves(load(path)["x"], whole)


@pytest.mark.parametrize("quick", [0.0, math.inf], ids=["small pages", "huge pages"])
def test_large_arrays_are_aligned_and_taken_over(quick: float, monkeypatch: pytest.MonkeyPatch):
    """Beyond a huge page, too; what a leaf has behind its end is the next one's."""
    monkeypatch.setattr(placement, "QUICK", quick)
    monkeypatch.setattr(placement, "_huge_pages", placement._HugePages())
    file, _ = random_file("Q6_K", (300, 60))
    found = load(file)["x"]
    assert found.packed.nbytes > placement.HUGE_PAGE
    assert not any(leaf.unsafe_buffer_pointer() % 64 for leaf in jax.tree.leaves(found))
    with cpu.use_core(False):
        assert_same_leaves(found, load(file)["x"])


TEXTS = {
    "none": [],
    "some": ["", "a", "\u00e9\U0001f600", "x" * 300],
    "not UTF-8": [b"\xff\xfe", b"ok\xc3"],
}


@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("name", TEXTS)
def test_lists_of_texts(name: str, core: bool):
    given = [each if isinstance(each, bytes) else each.encode() for each in TEXTS[name]]
    value = struct.pack("<IIQ", 9, 8, len(given)) + b"".join(struct.pack("<Q", len(each)) + each for each in given)
    with cpu.use_core(core), open_checkpoint(gguf_bytes(pairs=text("t") + value, count=1)) as checkpoint:
        found = checkpoint.metadata["t"]
    assert found == [each.decode(errors="surrogateescape") for each in given]


@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("length", [7, 2**31, 2**63, 2**64 - 1, 2**64 - 8])
def test_a_text_that_goes_on_after_the_end(length: int, core: bool):
    value = struct.pack("<IIQ", 9, 8, 2) + struct.pack("<Q", 1) + b"a" + struct.pack("<Q", length)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("t") + value + bytes(6)
    with cpu.use_core(core), pytest.raises(CheckpointError, match="in the middle of its header"):
        open_checkpoint(data)


def test_a_scale_that_is_no_number_in_one_standard_is_refused():
    file, blocks = random_file("MXFP4", (1, 1))
    bad = file[: -blocks.size] + b"\xff" + blocks.tobytes()[1:]
    with pytest.raises(CheckpointError, match="tensor 'x': a block has the scale 255, which is NaN"):
        load(bad)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(CheckpointError, match="tensor 'x': a block has the scale 255"):
        load(bad, sharding=device)


# TQ1_0 becomes TQ2_0; and of MXFP4 and NVFP4 the negative zeros, which ggml does not have, become zeros.
@pytest.mark.parametrize("kind", [kind for kind in GROUPED if kind not in ("TQ1_0", "MXFP4", "NVFP4")])
def test_what_was_read_is_written_byte_for_byte(kind: str, tmp_path: Path):
    file, blocks = random_file(kind, (2, 3))
    path = save_gguf(tmp_path / "a.gguf", {"x": load(file)["x"]})
    assert types(path) == {"x": kind}
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.entry("x").tensors[0].raw().tobytes() == blocks.tobytes()


def test_ternary_values_stay_from_one_type_to_the_other(tmp_path: Path):
    first = load(random_file("TQ1_0", (2, 3))[0])["x"]
    path = save_gguf(tmp_path / "a.gguf", {"x": first})
    assert types(path) == {"x": "TQ2_0"}
    assert_same_leaves(load(path)["x"], first)


UNKNOWN = [("Q4_K", "scale", 64), ("Q4_K", "offset", 255), ("Q3_K", "scale", 32), ("TQ2_0", "zero", 0)]


@pytest.mark.parametrize(("kind", "leaf", "value"), UNKNOWN)
def test_scales_that_a_type_has_not_are_refused(kind: str, leaf: str, value: int, tmp_path: Path):
    q = load(random_file(kind, (2, 3))[0])["x"]
    other = dataclasses.replace(q, **{leaf: getattr(q, leaf).at[0, 0].set(value)})
    with pytest.raises(ValueError, match=f"{kind} does not have each `{leaf}`"):
        save_gguf(tmp_path / "a.gguf", {"x": other})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_a_device_reads_its_part_of_the_blocks(axis: int, kind: str, monkeypatch: pytest.MonkeyPatch):
    file, blocks = random_file(kind, (4, 8, 16))
    whole, read = load(file)["x"], GROUPED[kind].read
    sizes = []

    def counted(leaf: str, part: np.ndarray) -> np.ndarray:
        sizes.append(len(part) if leaf == "packed" else 0)
        return read(leaf, part)

    codec = CODECS[kind, ArrayGrouped]
    monkeypatch.setitem(CODECS, (kind, ArrayGrouped), dataclasses.replace(codec, leaf=counted, separate=None))
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec(*[None] * axis, "x"))
    found = load(file, sharding=sharding)["x"]
    assert_same_leaves(found, whole)
    assert len(found.packed.sharding.device_set) == 4
    assert sum(sizes) == len(blocks)  # each block once


def test_a_real_file(request: pytest.FixtureRequest):
    path = request.config.getoption("--gguf-file", default=None)
    if path is None:
        pytest.skip("no `--gguf-file` was given")
    gguf = pytest.importorskip("gguf", reason="the judge of the format")
    reader = gguf.GGUFReader(path)
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint) == [tensor.name for tensor in reader.tensors]
        assert checkpoint.metadata["general.architecture"] == reader.get_field("general.architecture").contents()
        for tensor in reader.tensors:
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            found = dense(checkpoint[tensor.name]).astype(np.float32)
            assert np.array_equal(bits(found), bits(expected.reshape(tensor.shape[::-1]))), tensor.name


# --- what does not hold together ---


ALIGNMENT = text("general.alignment") + struct.pack("<II", 4, 3)
DEEP = text("deep") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 6
WRONG = {
    "a name in Latin-1": (gguf_bytes(("x", (1,), 0, 0)).replace(b"x", b"\xe9"), "a name is not UTF-8"),
    "another version": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "GGUF version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    "cut in the header": (b"GGUF\3\0\0\0\1", "ends at byte 9"),
    "too many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors can't be in the"),
    "too many pairs": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata entries can't be in the"),
    "a long name": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(20), "in the middle of its header"),
    "a long list": (gguf_bytes(pairs=text("a") + struct.pack("<IIQ", 9, 4, 2**62), count=1), "numbers can't be in the"),
    "lists in lists": (gguf_bytes(pairs=DEEP, count=1), "levels deep"),
    "a strange value": (gguf_bytes(pairs=text("a") + struct.pack("<I", 99), count=1), "value of type 99"),
    "a pair twice": (gguf_bytes(pairs=(text("a") + struct.pack("<IB", 0, 1)) * 2, count=2), "'a' twice"),
    "an odd alignment": (gguf_bytes(pairs=ALIGNMENT, count=1), "power of two"),
    "a name twice": (gguf_bytes(("x", (1,), 0, 0), ("x", (1,), 0, 32)), "tensor 'x': the name is there twice"),
    "an unknown type": (gguf_bytes(("x", (1,), 99, 0)), "type 99 is unknown"),
    "many axes": (gguf_bytes(("x", (1,) * 9, 0, 0)), "9 axes"),
    "absurd sizes": (gguf_bytes(("x", (2**40, 2**40), 0, 0)), "absurd"),
    "half a block": (gguf_bytes(("x", (33,), 8, 0)), "no multiple of the 32"),
    "beyond the end": (gguf_bytes(("x", (17,), 0, 0)), "the file is cut off"),
    "an offset beyond": (gguf_bytes(("x", (1,), 0, 2**63)), "the file is cut off"),
    "an odd offset": (gguf_bytes(("x", (1,), 0, 4)), "no multiple of the alignment"),
    "overlapping": (gguf_bytes(("x", (16,), 0, 0), ("y", (8,), 0, 32)), "tensor 'y': overlaps"),
}


@pytest.mark.parametrize(("data", "match"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_hold_together_is_refused(data: bytes, match: str):
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(data)
