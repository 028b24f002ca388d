"""Grouped arrays without values, for the layouts of other projects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from eformer._src.checkpoint.header import Tensor
from eformer._src.kernels.grouped import PLANES
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.stored import array_from_fields

from .bit_fields import pack_planes, plane_shapes
from .layout import Group

FLOATS = tuple(np.dtype(each) for each in (np.float32, np.float16, jax.numpy.bfloat16))
E8M0 = np.dtype(jax.numpy.float8_e8m0fnu)
AT_ONCE = 1 << 22  # elements that are unpacked at a time
Leaf = tuple[Sequence[int], DTypeLike]  # its shape and dtype


def grouped_like(
    shape: Sequence[int],
    bits: int,
    block_size: int,
    dtype: DTypeLike,
    leaves: Mapping[str, Leaf],
    codebook: str = "integer",
) -> ArrayGrouped:
    """An `ArrayGrouped` of this shape without values, packed along its last axis, with these leaves besides its codes.

    A TypeError or ValueError says why there is no such array.
    """
    planes = {name: jax.ShapeDtypeStruct(plane, np.uint8) for name, plane in plane_shapes(shape, bits).items()}
    others = {name: jax.ShapeDtypeStruct(tuple(size), np.dtype(kind)) for name, (size, kind) in leaves.items()}
    # A block can be no longer than the row; where a row is empty, blocks of one element have no entries either.
    sizes = {"block_size": max(block_size, 1), "padding": -shape[-1] % (8 // PLANES[bits][0])}
    return array_from_fields(
        ArrayGrouped, {**planes, **others, **sizes, "bits": bits, "codebook": codebook, "dtype": np.dtype(dtype)}
    )


def bytes_of(tensor: Tensor, count: int) -> np.ndarray:
    """The first `count` bytes of each row of a tensor, still in the file."""
    *rows, last = tensor.shape
    return tensor.raw().reshape(*rows, last * tensor.dtype.itemsize)[..., :count]


def planes_of(
    like: ArrayGrouped, words: np.ndarray, unpack: Callable[[np.ndarray], np.ndarray]
) -> dict[str, np.ndarray]:
    """The planes of `like` from rows of words, some at a time: codes take up to eight times the memory of planes."""
    rows, count = math.prod(like.shape[:-1]), like.shape[-1]
    shapes = plane_shapes((rows, count), like.bits)
    planes = {name: np.empty(shape, np.uint8) for name, shape in shapes.items()}
    words, step = words.reshape(rows, words.shape[-1]), max(AT_ONCE // max(count, 1), 1)
    for start in range(0, rows, step):
        for name, plane in pack_planes(unpack(words[start : start + step]), like.bits).items():
            planes[name][start : start + step] = plane
    return {name: plane.reshape(getattr(like, name).shape) for name, plane in planes.items()}


def block_of(group: Group, length: int, blocks: int, said: Iterable[int] = (), usual: int = 0) -> int:
    """The size of each of `blocks` blocks along an axis; `said` are the sizes that the configuration names.

    A CheckpointError if there is none: one says it, or `usual` fits where none says any, or blocks divide the axis.
    """
    named = sorted({size for size in said if size > 0})
    fitting = [size for size in named or [usual] if size > 0 and -(-length // size) == blocks]
    if len(fitting) == 1:
        return fitting[0]
    if blocks < 1 or length % blocks:
        raise group.wrong(f"{blocks} blocks do not divide {length} columns, and no configuration says their size")
    if named and not fitting:
        sizes = " or ".join(map(str, named))[:100]
        what = f"{blocks} blocks of {length} columns have {length // blocks}"
        raise group.wrong(f"{what}, and the configuration says {sizes}")
    return length // blocks


def one_per_matrix(group: Group, end: str, ndim: int) -> tuple[int, ...]:
    """The shape, of `ndim` axes, of a tensor with one entry, or one for each matrix of a stack."""
    tensor, stack = group[end], ndim - 2
    if math.prod(tensor.shape) == 1:
        return (1,) * ndim
    if len(tensor.shape) == stack:
        return (*tensor.shape, 1, 1)
    raise group.wrong(f"`{end[1:]}` must have one entry, or one for each matrix, got {list(tensor.shape)}")
