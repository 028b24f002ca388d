"""Orbax saves and restores trees with quantized arrays as they are; nothing of ours is needed for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from quantization.cases import assert_same_leaves, normal

from eformer.ops.quantization import quantize

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own


@pytest.fixture
def ocp() -> Any:
    return pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")


def tree() -> dict[str, Any]:
    return {
        "nf4": quantize(normal((64, 128)), dtype="nf4"),
        "double": quantize(normal((64, 128), jnp.bfloat16), dtype="nf4", double_quantization=True),
        "layers": [quantize(normal((64, 128)), dtype="int8")],
        "bias": normal((128,)),
    }


def test_a_quantized_tree_comes_back(ocp: Any, tmp_path: Path):
    expected = tree()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", expected)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "step", jax.tree.map(ocp.utils.to_shape_dtype_struct, expected))
    assert_same_leaves(found["nf4"], expected["nf4"])
    assert_same_leaves(found["double"], expected["double"])
    assert_same_leaves(found["layers"][0], expected["layers"][0])
    assert jnp.array_equal(found["bias"], expected["bias"])


def test_with_another_sharding(ocp: Any, tmp_path: Path):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    q = tree()["nf4"].with_sharding(NamedSharding(mesh, PartitionSpec("x", None)))
    other = q.with_sharding(NamedSharding(mesh, PartitionSpec(None, "y")))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"w": q})
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "step", {"w": jax.tree.map(ocp.utils.to_shape_dtype_struct, other)})[
            "w"
        ]
    assert_same_leaves(found, other)
    assert found.sharding == other.sharding
