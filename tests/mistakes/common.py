"""What people do wrong, and what they are told: a type of error, and words that its message must have.

A message says what was wrong, what was given and what would work. Each row of a table here is a mistake that somebody
makes at the keyboard: how it is made, the type of its error, and what its message says, with bars between the words.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import quantize
from eformer.ops.quantization import FormatSpec

Mistakes = dict[str, tuple[Any, type[Exception], str]]

W = np.linspace(-1, 1, 64 * 96, dtype=np.float32).reshape(64, 96)
X = jnp.ones((2, 64))
PARAMS = {"w": W, "b": np.zeros(96, np.float32)}


@functools.cache
def q(name: str = "int8") -> Any:
    return quantize(W, FormatSpec(name))


def model(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"][None]


def small() -> Any:
    return {"w": q(), "b": jnp.zeros(96)}


def check(call: Any, error: type[Exception], words: str, *args: object) -> None:
    with pytest.raises(error) as raised:
        call(*args)
    told = str(raised.value)
    assert not [word for word in words.split(" | ") if word not in told], told
