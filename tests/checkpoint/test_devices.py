"""Loading onto devices, and saving from them: each has its shard, and the file is that of the whole array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from quantization.cases import Case, assert_same_leaves, normal

from eformer._src.checkpoint.saving import save as saver
from eformer.checkpoint import load, save
from eformer.ops.quantization import quantize

from .files import bits


def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("x", "y"))


SHARDED = [
    (Case.of("nf4"), ("x", "y")),
    (Case.of("nf4", axis=0), (None, "x")),
    (Case.of("nf4", double_quantization=True), ("y",)),
    (Case.of("int8"), ("x", "y")),
    (Case.of("ternary"), ()),
]


@pytest.mark.parametrize(("case", "spec"), SHARDED, ids=str)
def test_loading_onto_devices(case: Case, spec: tuple[Any, ...], tmp_path: Path):
    """As if it had been loaded whole and then laid out."""
    q = case(normal((64, 128)))
    sharding = NamedSharding(mesh(), PartitionSpec(*spec))
    found = load(save(tmp_path, {"w": q}), sharding=sharding)["w"]
    expected = q.with_sharding(sharding)
    assert_same_leaves(found, expected)
    assert [leaf.sharding for leaf in jax.tree.leaves(found)] == [leaf.sharding for leaf in jax.tree.leaves(expected)]


def test_no_device_holds_the_whole(tmp_path: Path):
    found = load(save(tmp_path, {"w": normal((8, 4))}), sharding=NamedSharding(mesh(), PartitionSpec("x", "y")))["w"]
    assert {shard.data.shape for shard in found.addressable_shards} == {(2, 2)}
    assert bits(found) == bits(normal((8, 4)))


@pytest.mark.parametrize(("case", "spec"), SHARDED, ids=str)
def test_saving_from_devices_part_by_part(case: Case, spec: tuple[Any, ...], tmp_path: Path, monkeypatch: Any):
    """The file holds the whole array and fits other meshes; no more than a part of the array is in memory at once."""
    q = case(normal((64, 128)))
    spread = q.with_sharding(NamedSharding(mesh(), PartitionSpec(*spec)))
    parts: list[int] = []
    bytes_of = saver.contiguous_bytes
    monkeypatch.setattr(saver, "contiguous_bytes", lambda *args: parts.append(np.size(args[0])) or bytes_of(*args))
    whole = Path(save(tmp_path / "whole", {"w": q})).read_bytes()
    parts.clear()
    path = Path(save(tmp_path / "parts", {"w": spread}))
    assert path.read_bytes() == whole
    assert sorted(set(parts)) == sorted({leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(spread)})
    other = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), PartitionSpec(None, "all"))
    assert_same_leaves(load(path, sharding=other)["w"], q.with_sharding(other))


def test_shardings_by_name_function_and_like(tmp_path: Path):
    path = save(tmp_path, {"w": normal((8, 4)), "b": normal((4,))})
    one = NamedSharding(mesh(), PartitionSpec("x"))
    assert load(path, sharding={"w": one})["w"].sharding == one
    assert load(path, sharding=lambda name, shape: one if len(shape) == 2 else None)["w"].sharding == one
    assert load(path, like={"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=one)})["w"].sharding == one
    with jax.set_mesh(mesh()):
        assert load(path, sharding=PartitionSpec("x"))["w"].sharding.spec == PartitionSpec("x")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    assert load(path, sharding=device)["b"].sharding == device


@pytest.mark.filterwarnings("ignore:`with mesh.` context manager:DeprecationWarning")
@pytest.mark.parametrize("enter", [jax.set_mesh, lambda mesh: mesh], ids=["set_mesh", "with mesh"])
def test_a_spec_takes_the_mesh_of_the_block(enter: Any, tmp_path: Path):
    q, spec = quantize(normal((8, 64)), dtype="nf4"), PartitionSpec("x")
    path = save(tmp_path, {"w": q, "b": normal((8,))})
    with enter(mesh()):
        found = load(path, sharding=spec)
    assert found["b"].sharding == NamedSharding(mesh(), spec)
    assert found["w"].packed.sharding.spec[0] == "x"


def test_a_sharding_that_does_not_fit_names_the_array(tmp_path: Path):
    path = save(tmp_path, {"w": quantize(normal((6, 10)), dtype="nf4"), "b": normal((6,))})
    with pytest.raises(ValueError, match=r"'w', float32\[6, 10\], can't be laid out"):
        load(path, sharding={"w": NamedSharding(mesh(), PartitionSpec("x"))})
    with pytest.raises(ValueError, match=r"'b', float32\[6\], can't be laid out"):
        load(path, sharding={"b": NamedSharding(mesh(), PartitionSpec("x", "y"))})
    with pytest.raises(ValueError, match="needs a mesh"):
        load(path, sharding={"b": PartitionSpec("x")})
    with pytest.raises(TypeError, match="must be a Sharding"):
        load(path, sharding={"b": "x"})  # pyright: ignore[reportArgumentType]


def test_64_bits_stay_numpys(tmp_path: Path):
    array = np.array([2**40, -1])
    found = load(save(tmp_path, {"x": array}), sharding=NamedSharding(mesh(), PartitionSpec()))["x"]
    assert isinstance(found, np.ndarray)
    assert bits(found) == bits(array)
    with jax.enable_x64(True):
        assert isinstance(load(tmp_path)["x"], jax.Array)
