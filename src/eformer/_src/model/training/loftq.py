"""Updates of low rank that start at what quantization lost (LoftQ, arXiv 2310.08659)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from eformer._src.jaximus.array import materialize
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.registry import find_format, format_names


def loftq(
    original: jax.Array, base: Any, rank: int, factor: float, dtype: DTypeLike, steps: int
) -> tuple[Any, jax.Array, jax.Array]:
    """A base, `a` and `b` for which `base + factor * a @ b` is near to `original`.

    The first step takes the singular vectors of what `base` lost, which are nearest for this base. Each further step
    quantizes what the update leaves of `original`, in the format of `base`, and takes the singular vectors again. Of
    all steps the nearest is kept.
    """
    x = jnp.asarray(original, jnp.float32)

    def completed(base: Any) -> tuple[Any, jax.Array, jax.Array]:
        return base, *_nearest(x - materialize(base).astype(jnp.float32), rank, factor, dtype)

    def distance(base: Any, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum((x - materialize(base).astype(jnp.float32) - factor * _product(a, b)) ** 2)

    best = latest = completed(base)
    for _ in range(steps - 1):
        _, a, b = latest
        again = quantized_like(base, (x - factor * _product(a, b)).astype(base.dtype))
        if jax.tree.structure(again) != jax.tree.structure(base):
            raise ValueError(f"no format makes this {base} of a dense array, as more than one step of LoftQ must")
        latest = completed(again)
        nearer = distance(*latest) < distance(*best)
        best = jax.tree.map(lambda new, old, nearer=nearer: jnp.where(nearer, new, old), latest, best)
    return best


def quantized_like(q: QuantizedArray, array: jax.Array) -> QuantizedArray:
    """`array`, of the shape of `q`, in the format of `q` and with its options."""
    names = format_names(q)
    if not names:
        raise ValueError(f"no format makes a {type(q).__name__}: merge into dense weights, and quantize these")
    form = find_format(names[0])
    known = {name: getattr(q, name) for name in q._static_fields} | _options_of_leaves(q)
    return form.encode(array, **{name: known[name] for name in form.options if name in known})


def _options_of_leaves(q: Any) -> dict[str, Any]:
    """The options of formats that are told by which leaves an array has, and by their shapes."""
    scale = getattr(q, "scale", None)
    one_a_matrix = scale is not None and scale.shape[-2:] == (1, 1)
    return {
        "symmetric": getattr(q, "zero", None) is None and getattr(q, "offset", None) is None,
        "scale": None if scale is None else "tensor" if scale.size == 1 else "absmean" if one_a_matrix else "channel",
        "double_quantization": any(getattr(q, name, None) is not None for name in ("nested", "scale_scale")),
    }


def _nearest(lost: jax.Array, rank: int, factor: float, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The `a` and `b` of this rank for which `factor * a @ b` is nearest to `lost`."""
    left, values, right = jnp.linalg.svd(lost, full_matrices=False)
    root = jnp.sqrt(values[..., :rank] / factor)
    return (left[..., :rank] * root[..., None, :]).astype(dtype), (root[..., None] * right[..., :rank, :]).astype(dtype)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a.astype(jnp.float32) @ b.astype(jnp.float32)
