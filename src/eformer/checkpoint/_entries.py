"""Arrays in a checkpoint: what is known of them without reading, and their values as they lie in the file."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import tree_util as jtu

from eformer.ops.quantization import QuantizedArray

from ._describe import code_version, format_name
from ._error import CheckpointError
from ._header import Tensor


@dataclass(frozen=True)
class ArrayInfo:
    """What is known of an array without reading it."""

    shape: tuple[int, ...]
    dtype: np.dtype  # of the array represented
    format: str | None  # the name of a quantized format, ours or the file's; None if it is dense
    nbytes: int  # in the file


class Entry(abc.ABC):
    """An array in a checkpoint, in one tensor of the file or several."""

    tensors: Sequence[Tensor]

    @property
    @abc.abstractmethod
    def info(self) -> ArrayInfo: ...

    @property
    @abc.abstractmethod
    def like(self) -> Any:
        """What `host` gives, with `ShapeDtypeStruct` in place of the arrays."""

    @abc.abstractmethod
    def host(self) -> Any:
        """The array, or a quantized array, of NumPy arrays: looking into the file where they lie there as they are."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def drop(self) -> None:
        for tensor in self.tensors:
            tensor.drop()


class DenseEntry(Entry):
    """A tensor that is the array."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensors = (tensor,)

    @property
    def info(self) -> ArrayInfo:
        (tensor,) = self.tensors
        return ArrayInfo(tensor.shape, tensor.dtype, None, tensor.nbytes)

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        (tensor,) = self.tensors
        return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)

    def host(self) -> np.ndarray:
        return self.tensors[0].view()


def dtype_here(tensor: Tensor) -> np.dtype:
    """The dtype that a leaf of a quantized array has: of 64 bits only if JAX is set to hold such."""
    return jax.dtypes.canonicalize_dtype(tensor.dtype)


class QuantizedEntry(Entry):
    """Tensors that are the leaves of a quantized array; `like` has their shapes in place, `codes` is their version."""

    def __init__(self, name: str, like: QuantizedArray, tensors: Sequence[Tensor], codes: int) -> None:
        self.name, self.tensors, self._like, self._codes = name, tensors, like, codes

    @property
    def info(self) -> ArrayInfo:
        return ArrayInfo(self._like.shape, np.dtype(self._like.dtype), format_name(type(self._like)), self.nbytes)

    @property
    def like(self) -> QuantizedArray:
        return self._like

    def host(self) -> QuantizedArray:
        leaves = [tensor.view().astype(dtype_here(tensor), copy=False) for tensor in self.tensors]
        made = jtu.tree_unflatten(jtu.tree_structure(self._like), leaves)
        try:
            made.check_values()
        except ValueError as error:
            raise CheckpointError(str(error)[:300], file=self.tensors[0].file.name, tensor=self.name) from None
        return made if self._codes == code_version(type(made)) else made.recoded(self._codes)
