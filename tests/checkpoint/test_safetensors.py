"""Saving and loading trees: what comes back is what was saved, and others can read it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quantization.cases import Case, assert_same_leaves, every_case, every_format, normal
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from eformer._src.checkpoint.header import DTYPES
from eformer.checkpoint import CheckpointError, load, open_checkpoint, save
from eformer.ops.quantization import Array8B, RSROperatorBinary, RSROperatorTernary, quantize

from .files import bits, with_header


def assert_same_tree(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert str(jax.tree.structure(actual)) == str(jax.tree.structure(expected))  # True is equal to 1
    assert list(map(bits, jax.tree.leaves(actual))) == list(map(bits, jax.tree.leaves(expected)))


@every_case
def test_quantized_arrays_come_back(case: Case, tmp_path: Path):
    q = case(normal(dtype=jnp.bfloat16))
    assert_same_leaves(load(save(tmp_path, {"w": q}))["w"], q)


@every_format
@pytest.mark.parametrize("shape", [(7,), (), (0, 4)], ids=str)
def test_quantized_arrays_of_odd_shapes_come_back(case: Case, shape: tuple[int, ...], tmp_path: Path):
    q = case(normal(shape))
    assert_same_leaves(load(save(tmp_path, {"w": q}))["w"], q)


@pytest.mark.parametrize("operator", [RSROperatorBinary, RSROperatorTernary])
@pytest.mark.parametrize("k", [3, 11])
def test_rsr_operators_come_back(operator: Any, k: int, tmp_path: Path):
    q = operator.from_matrix(jnp.eye(6, 10, dtype=jnp.int8), k=k)
    assert_same_leaves(load(save(tmp_path, [q]))[0], q)


def test_stacked_layers_come_back(tmp_path: Path):
    q = jax.vmap(lambda w: quantize(w, dtype="nf4", double_quantization=True, axis=0))(normal((3, 6, 10)))
    assert_same_leaves(load(save(tmp_path, q)), q)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 7)], ids=str)
def test_every_dtype_comes_back(dtype: np.dtype, shape: tuple[int, ...], tmp_path: Path):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(0).integers(
        0, 2 if dtype == np.bool_ else 256, count, np.uint8
    )  # NaNs with odd bits too
    array = raw.view(dtype).reshape(shape)
    found = load(save(tmp_path, {"x": array}))["x"]
    assert bits(found) == bits(array)


@pytest.mark.parametrize("dtype", [jnp.int4, ml_dtypes.float8_e3m4, np.complex128, np.dtype("S3")], ids=str)
def test_a_dtype_without_a_name_is_refused(dtype: Any, tmp_path: Path):
    with pytest.raises(TypeError, match=r"'x' is .* safetensors can't hold"):
        save(tmp_path, {"x": np.zeros(3, dtype)})
    assert not list(tmp_path.iterdir())


class Point(NamedTuple):
    x: Any
    y: Any


TREES = {
    "nested": {"b": [np.ones(2), {"c": np.zeros(3)}], "a": np.arange(3)},
    "empty": {"a": {}, "b": [], "c": None, "d": [None, {}]},
    "nothing": {},
    "lone": np.ones(3),
    "dots": {"a.b": np.ones(2), "a": {"c": np.ones(1)}},
    "integers": {0: np.ones(1), 10: np.ones(2), 2: [np.ones(3)]},
    "truth values": {True: np.ones(1), False: {}},
    "numbers": {1.5: np.ones(1), -2: np.ones(2), True: np.ones(3)},
    "tuples": {(1, "a"): np.ones(1), (1, "b", (0.5, False)): [np.ones(2)], (): None},
    "odd names": {"": np.ones(1), "é\u2603 \n": np.ones(2), '"\\': {"/..": np.ones(3)}},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("max_shard_bytes", [None, 1])
def test_trees_come_back(tree: Any, max_shard_bytes: int | None, tmp_path: Path):
    assert_same_tree(load(save(tmp_path, tree, max_shard_bytes=max_shard_bytes)), tree)


def test_other_nodes_become_dicts_and_lists_or_what_like_is(tmp_path: Path):
    tree = {"t": (np.ones(2), Point(np.zeros(1), np.ones(1))), "n": 3, "f": 0.1, "b": True}
    path = save(tmp_path, tree)
    assert_same_tree(load(path)["t"], [np.ones(2), {"x": np.zeros(1), "y": np.ones(1)}])
    found = load(path, like=tree)
    assert_same_tree(found, tree)
    assert [type(found[key]) for key in "nfb"] == [int, float, bool]


def test_like_gives_structure_and_shape_and_the_file_the_format(tmp_path: Path):
    q = quantize(normal(), dtype="nf4")
    path = save(tmp_path, {"w": q, "other": np.ones(3)})
    found = load(path, like={"w": jax.ShapeDtypeStruct(q.shape, jnp.float32)})
    assert found.keys() == {"w"}
    assert_same_leaves(found["w"], q)
    with pytest.raises(CheckpointError, match=r"tensor 'w': its shape is \(6, 10\), and `like` has \(10, 6\)"):
        load(path, like={"w": jax.ShapeDtypeStruct((10, 6), jnp.float32)})
    with pytest.raises(CheckpointError, match="tensor 'v': 1 of 2 leaves of `like` are not in the checkpoint"):
        load(path, like={"w": q, "v": q})
    with pytest.raises(ValueError, match="`flat` and `like`"):
        load(path, like=q, flat=True)


def test_flat(tmp_path: Path):
    assert load(save(tmp_path, {"a": [np.ones(2)]}), flat=True).keys() == {"a.0"}


_INT8 = Array8B(jnp.ones((3, 1)), jnp.ones((3, 2), jnp.int8), (-1,))

REFUSED = {
    "a string": ({"a": "text"}, TypeError, "'a' is a str"),
    "a name twice": ({"a": {"x": [np.ones(1)]}, "a.x.0": np.ones(1)}, ValueError, "two leaves have the name 'a.x.0'"),
    "a leaf's name": ({"w": _INT8, "w.scale": np.ones(1)}, ValueError, "both write a tensor 'w.scale'"),
    "no text": ({"\udcff": np.ones(1)}, ValueError, "can't be written as UTF-8"),
    "no number": ({float("nan"): np.ones(1)}, TypeError, "a key of a dict is nan, a float"),
    "bytes": ({b"a": np.ones(1)}, TypeError, "a key of a dict is b'a', a bytes"),
    "a set in a tuple": ({(frozenset(),): np.ones(1)}, TypeError, r"a key of a dict is frozenset\(\)"),
    "keys without an order": ({(1, "2"): np.ones(1), (1, 2): {}}, ValueError, "Comparator raised"),
    "too deep": (functools.reduce(lambda tree, _: [tree], range(101), np.ones(1)), ValueError, "more than 100 levels"),
    "too many axes": ({"x": np.ones((1,) * 33)}, ValueError, "'x' has the shape"),
    "reserved": ({"__metadata__": np.ones(1)}, ValueError, "reserved"),
}


@pytest.mark.parametrize(("tree", "error", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_place_is_refused(tree: Any, error: type[Exception], match: str, tmp_path: Path):
    with pytest.raises(error, match=match):
        save(tmp_path, tree)
    assert not list(tmp_path.iterdir())


def test_an_unregistered_class_is_refused(tmp_path: Path):
    class Mine(Array8B):
        pass

    q = _INT8
    with pytest.raises(TypeError, match="'w' is a Mine, which is not registered"):
        save(tmp_path, {"w": Mine(q.scale, q.weight, q.axis)})


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"eformer": "x"}], ids=str)
def test_metadata_is_text(metadata: Any, tmp_path: Path):
    with pytest.raises((TypeError, ValueError), match="metadata"):
        save(tmp_path, {"x": np.ones(1)}, metadata=metadata)


def test_metadata_comes_back(tmp_path: Path):
    with open_checkpoint(save(tmp_path, {"x": np.ones(1)}, metadata={"format": "flax", "é": ""})) as checkpoint:
        assert checkpoint.metadata == {"format": "flax", "é": ""}


# --- files ---


def test_nothing_is_replaced_unasked(tmp_path: Path):
    path = save(tmp_path / "a.safetensors", {"x": np.ones(1)})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(path, {"x": np.zeros(1)})
    assert load(path)["x"] == 1
    save(path, {"x": np.zeros(1)}, overwrite=True)
    assert load(path)["x"] == 0


@pytest.mark.parametrize("before", [None, 1, 100], ids=lambda b: f"before={b}")
@pytest.mark.parametrize("after", [None, 1, 100], ids=lambda a: f"after={a}")
def test_overwriting_leaves_one_checkpoint(before: int | None, after: int | None, tmp_path: Path):
    """Whether the old or the new one is in shards: the folder opens, holds the new, and nothing is left over."""
    (tmp_path / "config.json").write_text("{}")
    save(tmp_path, {"a": np.zeros(20), "b": np.zeros(20)}, max_shard_bytes=before)
    path = save(tmp_path, {"a": np.ones(20), "b": np.ones(20)}, max_shard_bytes=after, overwrite=True)
    assert_same_tree(load(tmp_path), {"a": np.ones(20), "b": np.ones(20)})
    shards = 0 if after is None else 2
    assert len(list(tmp_path.iterdir())) == 2 + shards
    assert path.exists()


def test_shards_keep_to_the_size(tmp_path: Path):
    q = quantize(normal((64, 128)), dtype="nf4")
    index = save(tmp_path, {f"w{i}": q for i in range(5)}, max_shard_bytes=2 * q.nbytes)
    described = json.loads(index.read_text())
    assert described["metadata"]["total_size"] == 5 * q.nbytes
    shards = sorted(set(described["weight_map"].values()))
    assert [re.sub("-[0-9a-f]{8}-", "-", name) for name in shards] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert {described["weight_map"][f"w1.{leaf}"] for leaf in ("packed", "absmax")} == {shards[0]}
    with open_checkpoint(tmp_path / shards[2]) as alone:  # a shard opens by itself too
        assert_same_leaves(alone["w4"], q)


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "1GB"], ids=repr)
def test_the_size_of_shards_is_checked(most: Any, tmp_path: Path):
    with pytest.raises(ValueError, match="max_shard_bytes"):
        save(tmp_path, {"x": np.ones(1)}, max_shard_bytes=most)


def test_a_failure_leaves_nothing(tmp_path: Path):
    def stop(name: str, done: int, total: int) -> None:
        del name
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, {f"w{i}": np.ones(9) for i in range(4)}, max_shard_bytes=100, progress=stop)
    assert not list(tmp_path.iterdir())


def test_progress_ends_at_the_total(tmp_path: Path):
    tree = {"a": np.ones(3), "q": _INT8}
    calls: list[tuple[str, int, int]] = []
    path = save(tmp_path, tree, progress=lambda *call: calls.append(call))
    load(path, progress=lambda *call: calls.append(call))
    load(path, like=tree, progress=lambda *call: calls.append(call))
    total = 24 + tree["q"].nbytes
    assert [call for call in calls if call[1] == call[2]] == [("q", total, total)] * 3
    with pytest.raises(TypeError, match="`progress` must be"):
        load(path, progress=True)  # pyright: ignore[reportArgumentType]


def test_opening_a_folder_names_what_it_lacks(tmp_path: Path):
    with pytest.raises(CheckpointError, match="the folder has no"):
        open_checkpoint(tmp_path)
    save(tmp_path / "a.safetensors", {"x": np.ones(1)})
    assert open_checkpoint(tmp_path).path == tmp_path / "a.safetensors"
    save(tmp_path / "b.safetensors", {"x": np.ones(1)})
    with pytest.raises(CheckpointError, match=r"2 checkpoints in it \(a.safetensors, b.safetensors\)"):
        open_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "c.safetensors")


# --- lazily ---


def test_info_reads_no_data(tmp_path: Path):
    """A file of 256 GB, all hole: what is asked for costs what it is."""
    entry = {"dtype": "F32", "shape": [2**18, 2**18], "data_offsets": [0, 2**38]}
    small = {"dtype": "U8", "shape": [4], "data_offsets": [2**38, 2**38 + 4]}
    header = json.dumps({"big": entry, "small": small}).encode()
    path = tmp_path / "sparse.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 2**38 + 4)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.info("big").nbytes == 2**38
        assert bits(checkpoint["small"]) == bits(np.zeros(4, np.uint8))


def test_a_checkpoint_is_a_mapping(tmp_path: Path):
    q = quantize(normal((6, 128), jnp.bfloat16), dtype="nf4")
    path = save(tmp_path, {"w": q, "b": np.ones(3, np.float32)})
    with open_checkpoint(path) as checkpoint:
        assert dict(checkpoint).keys() == {"w", "b"}
        assert len(checkpoint) == 2
        assert "w.packed" not in checkpoint
        info = checkpoint.info("w")
        assert (info.shape, info.dtype, info.format, info.nbytes) == ((6, 128), jnp.bfloat16, "nf4", q.nbytes)
        assert checkpoint.info("b").format is None
        assert repr(checkpoint) == f"Checkpoint('{path}', safetensors, 2 arrays)"
        with pytest.raises(KeyError):
            checkpoint["v"]
    with pytest.raises(ValueError, match="closed"):
        checkpoint["w"]


def test_what_was_read_outlives_the_file(tmp_path: Path):
    path = save(tmp_path / "a.safetensors", {"x": np.arange(1024.0, dtype=np.float32)})
    x = load(path)["x"]
    with open(path, "r+b") as file:
        file.truncate(10)
    assert x.sum() == 1023 * 512


def test_from_bytes(tmp_path: Path):
    q = _INT8
    assert_same_leaves(load(save(tmp_path, {"w": q}).read_bytes())["w"], q)


# --- with the package that defines the format ---


def numpy_tree() -> dict[str, Any]:
    kinds = [d for d in DTYPES.values() if not d.name.startswith(("float8", "bfloat"))]
    return {d.name: np.arange(12).reshape(3, 4).astype(d) for d in kinds}


def test_the_package_reads_ours(tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="the judge of the format")
    q = quantize(normal((6, 128)), dtype="nf4")
    found = safetensors.load_file(save(tmp_path, {**numpy_tree(), "w": q}))
    assert_same_tree({name: found[name] for name in numpy_tree()}, numpy_tree())
    assert bits(found["w.packed"]) == bits(q.packed)


@pytest.mark.parametrize("name", [n for n in DTYPES if n.startswith(("F8", "BF"))])
def test_the_package_knows_our_names_of_small_floats(name: str, tmp_path: Path):
    safetensors = pytest.importorskip("safetensors", reason="the judge of the format")
    path = save(tmp_path, {"x": np.zeros((2, 3), DTYPES[name])})
    assert safetensors.deserialize(path.read_bytes())[0][1]["dtype"] == name


def test_ours_reads_the_packages(tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="the judge of the format")
    path = tmp_path / "foreign.safetensors"
    safetensors.save_file(numpy_tree(), path, metadata={"format": "pt"})
    assert_same_tree(load(path), numpy_tree())
    assert open_checkpoint(path).metadata == {"format": "pt"}


def test_metadata_may_be_null():
    """As MLX writes it for a program that gives it none."""
    header = b'{"__metadata__":null,"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    with open_checkpoint(with_header(header, b"\7")) as checkpoint:
        assert checkpoint.metadata == {}
        assert checkpoint["x"][0] == 7


def test_tensors_may_lie_anywhere():
    """Other writers need not put floats at multiples of four bytes."""
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    b = np.array([1.5, np.nan], np.float32)
    assert bits(load(len(header).to_bytes(8, "little") + header + b"\7" + b.tobytes())["b"]) == bits(b)


# --- models ---


def test_flax_models(tmp_path: Path):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    path = save(tmp_path, state)
    assert load(path, flat=True).keys() == {"kernel", "bias"}
    assert load(path).keys() == {"kernel", "bias"}
    assert_same_tree(load(path, like=state), state)


def test_equinox_models(tmp_path: Path):
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    model = eqx.nn.Linear(8, 16, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    found = load(save(tmp_path, arrays), like=arrays)
    assert_same_tree(found, arrays)
    x = normal((8,))
    assert bits(eqx.combine(found, static)(x)) == bits(model(x))


def test_ternary_codes_of_earlier_files(tmp_path: Path):
    """They were one more than the values they stood for, and descriptions named no version."""
    q = quantize(normal((13, 5)), dtype="ternary", scale="channel")
    path = save(tmp_path / "w.safetensors", {"w": q})
    with safe_open(path, "np") as file:
        ours = json.loads(file.metadata()["eformer"])
    tensors = load_file(path)
    assert ours["arrays"]["w"].pop("codes") == 2
    values = np.sign(np.asarray(q.materialize()))
    filled = np.concatenate([values, np.zeros((3, 5))]).astype(np.uint8).reshape(4, 4, 5) + 1
    tensors["w.weight"] = np.sum(filled << np.array([0, 2, 4, 6], np.uint8)[:, None], 1, dtype=np.uint8)
    save_file(tensors, path, {"eformer": json.dumps(ours)})
    assert_same_leaves(load(path)["w"], q)
    ours["arrays"]["w"]["codes"] = 3
    save_file(tensors, path, {"eformer": json.dumps(ours)})
    with pytest.raises(CheckpointError, match="its codes have version 3; this release reads 2"):
        load(path)


def test_a_damaged_array_is_not_saved(tmp_path: Path):
    q = quantize(normal((10, 4)), dtype="nf4")
    damaged = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), q)
    with pytest.raises(ValueError, match="'w' can't be saved: that is no ArrayNF4: packed must be uint8"):
        save(tmp_path, {"w": damaged})


def test_a_block_that_is_longer_than_its_row_takes_no_memory(tmp_path: Path):
    q = quantize(normal((10, 3)), dtype="nf4")
    wide = dataclasses.replace(q, block_size=2**30)
    again = load(save(tmp_path, {"w": wide}))["w"]
    assert again.block_size == 2**30
    assert np.array_equal(again.materialize(), q.materialize())
