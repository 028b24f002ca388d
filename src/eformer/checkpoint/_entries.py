"""Arrays in a checkpoint: what is known of them without reading, and their values as they are in the file."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import tree_util as jtu

from eformer.ops.quantization import QuantizedArray

from ._describe import FORMAT_ERRORS, code_version, format_name
from ._error import CheckpointError
from ._header import Tensor
from ._records import Like, Q


@dataclass(frozen=True)
class ArrayInfo:
    """Facts about an array that are known without reading it."""

    shape: tuple[int, ...]
    dtype: np.dtype  # of the array represented
    format: str | None  # the name of a quantized format, ours or the file's; None if the array is dense
    nbytes: int  # in the file


class Entry(abc.ABC):
    """An array in a checkpoint, made of one tensor of the file or several."""

    name: str
    format: str | None = None
    tensors: Sequence[Tensor]

    @property
    @abc.abstractmethod
    def like(self) -> Like:
        """The array that `host` gives, without values."""

    @abc.abstractmethod
    def host(self) -> np.ndarray | QuantizedArray:
        """The array, dense or quantized, of NumPy arrays; they look into the file where nothing has to be decoded."""

    @property
    def info(self) -> ArrayInfo:
        return ArrayInfo(tuple(self.like.shape), np.dtype(self.like.dtype), self.format, self.nbytes)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def drop(self) -> None:
        for tensor in self.tensors:
            tensor.drop()

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(what, file=self.tensors[0].file.name, tensor=self.name)

    def checked(self, make: Callable[[], Q]) -> Q:
        """`make()`, of NumPy arrays; a CheckpointError if that fails, or if the codes are none of its format."""
        try:
            made = make()
            made.check_values()
        except FORMAT_ERRORS as error:
            raise self.wrong(str(error)[:300]) from None
        return made


class DenseEntry(Entry):
    """A tensor that is the array."""

    def __init__(self, tensor: Tensor) -> None:
        self.name, self.tensors = tensor.name, (tensor,)

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        (tensor,) = self.tensors
        return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)

    def host(self) -> np.ndarray:
        return self.tensors[0].view()


def dtype_here(tensor: Tensor) -> np.dtype:
    """The dtype of a leaf of a quantized array: 64 bits only if JAX has 64-bit types enabled."""
    return jax.dtypes.canonicalize_dtype(tensor.dtype)


class QuantizedEntry(Entry):
    """Tensors that are the leaves of a quantized array; `codes` is the version of its codes."""

    def __init__(self, name: str, like: QuantizedArray, tensors: Sequence[Tensor], codes: int) -> None:
        self.name, self.tensors, self._like, self._codes = name, tensors, like, codes
        self.format = format_name(type(like))

    @property
    def like(self) -> QuantizedArray:
        return self._like

    def host(self) -> QuantizedArray:
        leaves = [tensor.view().astype(dtype_here(tensor), copy=False) for tensor in self.tensors]
        made = self.checked(lambda: jtu.tree_unflatten(jtu.tree_structure(self._like), leaves))
        return made if self._codes == code_version(type(made)) else made.recoded(self._codes)
