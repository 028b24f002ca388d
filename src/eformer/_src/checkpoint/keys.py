"""Random keys in checkpoints: a file has their data, uint32, and `load` makes keys of it where `like` has keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def is_key(leaf: object) -> bool:
    """Whether `leaf` is an array of random keys, with or without values, as `jax.random.key` makes them."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def as_stored(leaf: Any) -> Any:
    """The data of a key; any other leaf as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) and isinstance(leaf, jax.Array) else leaf


def stored_shape(leaf: Any) -> tuple[int, ...]:
    """The shape that a leaf has in a file."""
    return _data(leaf)[0] if is_key(leaf) else tuple(getattr(leaf, "shape", ()))


def as_key(data: Any, like: Any) -> jax.Array:
    """Keys of the generator that those of `like` are for."""
    return jax.random.wrap_key_data(jnp.asarray(data), impl=_data(like)[1])


def _data(like: Any) -> tuple[tuple[int, ...], Any]:
    """The shape of the data of keys, and their generator; keys without values are told by their type alone."""
    generators = []

    def data(keys: jax.Array) -> jax.Array:
        generators.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    return jax.eval_shape(data, like).shape, generators[0]
