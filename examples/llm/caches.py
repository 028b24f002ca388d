"""The caches of keys and values that `model.py` may be given: it does not know which."""

from __future__ import annotations

import functools
from collections.abc import Callable

from eformer import cache

from .model import Cache, Config, empty_cache


def quantized_cache(config: Config, batch: int, length: int, *, format: str) -> Cache:
    """`empty_cache` in a format of `eformer.cache`."""
    heads, size = batch * config.kv_heads, config.head_size
    keys = [cache.empty((heads, size, length), format=format, axis=-2) for _ in range(config.layers)]
    values = [cache.empty((heads, length, size), format=format) for _ in range(config.layers)]
    return list(zip(keys, values, strict=True))  # pyright: ignore[reportReturnType]  # stand for arrays


CACHES: dict[str, Callable[[Config, int, int], Cache]] = {
    "float32": empty_cache,
    **{format: functools.partial(quantized_cache, format=format) for format in ("int8", "fp8", "int4")},
}
