"""Which leaf is not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from eformer.model import add_lora, check_finite, find_nonfinite, quantize_model


@pytest.mark.filterwarnings("ignore::eformer.model.NonfiniteWarning")
def test_every_kind_of_leaf_is_named():
    tree = quantize_model({"one": {"kernel": jnp.ones((64, 64)).at[3, 5].set(jnp.nan)}, "bias": jnp.zeros(4)})
    found = find_nonfinite({"params": tree, "loss": jnp.float32(jnp.inf), "step": jnp.int32(1), "name": "x"})
    assert set(found) == {"params.one.kernel", "loss"}
    assert found["loss"] == (0, 1)
    assert found["params.one.kernel"].nan > 0
    adapted = add_lora(quantize_model({"kernel": jnp.ones((64, 64))}), key=jax.random.key(0))
    check_finite(adapted)
    broken = jax.tree.map(lambda x: x / 0 if jnp.issubdtype(x.dtype, jnp.floating) else x, adapted)
    assert {"kernel.a", "kernel.b", "kernel.scaling"} <= set(find_nonfinite(broken))


def test_the_error_names_leaves():
    with pytest.raises(FloatingPointError, match=r"not finite: 'kernel' \(1 NaN, 2 infinite\)$"):
        check_finite({"kernel": jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0]), "bias": jnp.zeros(3)})
    with pytest.raises(FloatingPointError, match="and 2 more"):
        check_finite([jnp.array(jnp.nan)] * 7)
    with pytest.raises(FloatingPointError, match=r"not finite: 'loss' \(1 NaN, 0 infinite\)$"):
        check_finite({"loss": float("nan"), "step": 3, "rate": 0.1})
    with pytest.raises(TypeError, match="values are not known under `jit`: return them"):
        jax.jit(check_finite)({"loss": jnp.float32(1)})
