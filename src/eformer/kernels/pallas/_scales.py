"""Where scales go: into the tiles of a kernel, or beside the product."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eformer.kernels import Matrix, reference


def block_scales(matrix: Matrix) -> jax.Array:
    """The float32 scales of "nf4", decoded if they are quantized."""
    codes, *rest = matrix.scales
    if not rest:
        return codes
    nested, offset, _ = rest
    return reference.decode_dynamic(codes.reshape(matrix.count, -1), nested, offset).reshape(codes.shape)


def is_outer(matrix: Matrix) -> bool:
    """Whether the scale does not vary along both axes, so that the product needs none inside."""
    return not any(1 not in scale.shape[1:] for scale in matrix.scales)


def beside_product(x: jax.Array, matrix: Matrix, contracted_axis: int) -> tuple[jax.Array, jax.Array | None]:
    """A scale that varies along what is summed multiplies x; any other, (count, 1, n), the result."""
    if not matrix.scales:
        return x, None
    scale = matrix.scales[0] if contracted_axis == 0 else jnp.swapaxes(matrix.scales[0], 1, 2)
    if scale.shape[1] > 1:
        return x.astype(jnp.float32) * jnp.swapaxes(scale, 1, 2), None
    return x, jnp.broadcast_to(scale, (*scale.shape[:2], matrix.cols if contracted_axis == 0 else matrix.rows))
