"""Under `jax.disable_jit()`, which people debug with, everything runs, one operation at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer.jaximus import implicit
from eformer.ops.quantization import quantize

from .cases import CLASSES

FUNCTIONS = {
    "matmul": lambda q, x: x @ q,
    "jit": lambda q, x: jax.jit(jnp.dot)(x, q),
    "scan": lambda q, x: lax.scan(lambda c, _: (jnp.tanh(c @ q @ q.T), None), x, length=2)[0],
    "cond": lambda q, x: lax.cond(x.sum() > 0, lambda: x @ q, lambda: x @ (2 * q)),
    "checkpoint": lambda q, x: jax.checkpoint(lambda q, x: x @ q)(q, x),
    "grad": lambda q, x: jax.grad(lambda x: jnp.sum(x @ q))(x),
    "vmap": lambda q, x: jax.vmap(lambda row: row @ q)(x),
}


@pytest.mark.parametrize("form", CLASSES)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_runs_as_it_does_when_compiled(function, form, getkey):
    q = quantize(jax.random.normal(getkey(), (16, 8)), dtype=form)
    x = jax.random.normal(getkey(), (3, 16))
    expected = implicit(function)(q, x)
    with jax.disable_jit():
        found = implicit(function)(q, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
