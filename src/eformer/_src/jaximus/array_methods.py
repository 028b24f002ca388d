"""Operators, methods and properties of `jax.Array`: an implicit array has them outside `implicit`, too."""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu
from jax.core import ShapedArray
from jax.typing import DTypeLike

from .libraries import note_conversion
from .types import Device, Leaf, Tree, Value

_Operator = Callable[..., Tree]  # takes whatever the dense array would take


def _operator(function: _Operator) -> _Operator:
    return lambda self, *other: self._apply(function, self, *other)


def _reflected(function: _Operator) -> _Operator:
    return lambda self, other: self._apply(function, other, self)


def _method(name: str, *, dense: bool = False) -> _Operator:
    def call(self: ArrayMethods, *args: Value, **kwargs: Value) -> Tree:
        method = operator.methodcaller(name, *args, **kwargs)
        return method(self.materialize()) if dense else self._apply(method, self)

    how = "of the dense array, which is made for it" if dense else "through the registered rules"
    call.__name__, call.__doc__ = name, f"As `jax.Array.{name}`, {how}."
    return call


dense_method = functools.partial(_method, dense=True)


def _attribute(name: str) -> property:
    return property(_operator(operator.attrgetter(name)))


def _for_all_leaves(name: str) -> property:
    get = operator.attrgetter(name)
    return property(lambda self: all(map(get, jtu.tree_leaves(self))), doc=f"Whether all leaves are `{name}`.")


def check_matmul(lhs: Value, rhs: Value) -> None:
    """Raise, naming both operands, if `lhs @ rhs` has no meaning."""
    for x in (lhs, rhs):
        if isinstance(x, ArrayMethods):
            x._check_leaves()  # without all leaves there is no shape
    left, right = np.shape(lhs), np.shape(rhs)
    contracted = right[-2] if len(right) > 1 else right[-1] if right else None
    if left and right and left[-1] == contracted:
        return
    named = " @ ".join(
        f"{type(x).__name__ if isinstance(x, ArrayMethods) else 'array'}{list(np.shape(x))}" for x in (lhs, rhs)
    )
    if not left or not right:
        raise TypeError(f"{named}: `@` needs at least one axis on both sides; use `*` with a scalar")
    axis = "second-to-last" if len(right) > 1 else "only"
    raise TypeError(
        f"{named}: the last axis of the left operand ({left[-1]}) must be as long as the {axis} axis "
        f"of the right operand ({contracted})"
    )


class ArrayMethods:
    """Operators, indexing and most methods take the rules that `implicit` takes.

    A method that needs the dense array, such as `tobytes`, takes `materialize()`; attributes of storage, such as
    `nbytes`, are those of the leaves.
    """

    shape: Any
    dtype: Any
    weak_type: ClassVar[bool] = False

    # The engine is built on arrays: `_trace` sets these when it is imported.
    _apply: ClassVar[staticmethod[..., Tree]]
    _matmul: ClassVar[staticmethod[[Value, Value], Value]]
    _abstract_value: ClassVar[staticmethod[[Value], ShapedArray]]

    __array_priority__: ClassVar[int] = 1000

    def materialize(self) -> jax.Array:
        raise NotImplementedError

    def _check_leaves(self) -> None:
        raise NotImplementedError

    def _is_part(self) -> bool:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes stored: those of the leaves, not of the dense array."""
        return sum(math.prod(s.shape) * s.dtype.itemsize for s in map(struct, jtu.tree_leaves(self)))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                f"np.asarray of {type(self).__name__} always makes a new array: `copy=False` cannot be met"
            )
        note_conversion(self, sys._getframe(1))
        return np.asarray(self.materialize(), dtype=dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Value, **kwargs: Value) -> Value:
        """NumPy's functions, and its operators where a NumPy array is on the left, as those of JAX with that name."""
        if ufunc is np.matmul and method == "__call__" and not kwargs:
            return self._matmul(*inputs)
        function = getattr(jnp, ufunc.__name__, None)
        if method == "__call__" and not kwargs and len(inputs) == ufunc.nin and function is not None:
            return self._apply(function, *inputs)
        dense = [np.asarray(x) if isinstance(x, ArrayMethods) else x for x in inputs]
        return getattr(ufunc, method)(*dense, **kwargs)

    # As for jax.Array: `==` compares elements, so the array can't be hashed.
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # object declares it a method
    __eq__ = _operator(operator.eq)  # pyright: ignore[reportAssignmentType]  # object declares it to return bool
    __ne__ = _operator(operator.ne)  # pyright: ignore[reportAssignmentType]
    __lt__, __le__ = _operator(operator.lt), _operator(operator.le)
    __gt__, __ge__ = _operator(operator.gt), _operator(operator.ge)

    __add__, __radd__ = _operator(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _operator(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _operator(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _operator(operator.mod), _reflected(operator.mod)
    __divmod__, __rdivmod__ = _operator(divmod), _reflected(divmod)
    __pow__, __rpow__ = _operator(operator.pow), _reflected(operator.pow)
    __and__, __rand__ = _operator(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _operator(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _operator(operator.xor), _reflected(operator.xor)
    __lshift__, __rlshift__ = _operator(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _operator(operator.rshift), _reflected(operator.rshift)
    __neg__, __pos__ = _operator(operator.neg), _operator(operator.pos)
    __abs__, __invert__ = _operator(operator.abs), _operator(operator.invert)

    def __matmul__(self, other: Value) -> jax.Array:
        return self._matmul(self, other)

    def __rmatmul__(self, other: Value) -> jax.Array:
        return self._matmul(other, self)

    def __getitem__(self, index: Value) -> Value:
        return self._apply(lambda array: array[index], self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[Value]:
        return (self[i] for i in range(len(self)))

    __bool__, __int__, __index__ = map(dense_method, ("__bool__", "__int__", "__index__"))
    __float__, __complex__ = map(dense_method, ("__float__", "__complex__"))
    item, tolist, byteswap = map(dense_method, ("item", "tolist", "byteswap"))
    addressable_data, __dlpack__ = map(dense_method, ("addressable_data", "__dlpack__"))
    addressable_shards = property(lambda self: self.materialize().addressable_shards, doc="Those of the dense array.")
    global_shards = property(lambda self: self.materialize().global_shards, doc="Those of the dense array.")

    @property
    def at(self) -> _IndexUpdates:
        """As `jax.Array.at`: `q.at[index].set(value)` is a new array."""
        return _IndexUpdates(self)

    T, mT, real, imag = map(_attribute, ("T", "mT", "real", "imag"))
    astype, view = _method("astype"), _method("view")
    reshape, transpose, swapaxes = map(_method, ("reshape", "transpose", "swapaxes"))
    ravel, flatten, squeeze = map(_method, ("ravel", "flatten", "squeeze"))
    dot, take, diagonal, trace = map(_method, ("dot", "take", "diagonal", "trace"))
    sum, prod, mean, std, var = map(_method, ("sum", "prod", "mean", "std", "var"))
    max, min, argmax, argmin = map(_method, ("max", "min", "argmax", "argmin"))
    all, any, ptp, clip, round = map(_method, ("all", "any", "ptp", "clip", "round"))
    cumsum, cumprod, sort, argsort = map(_method, ("cumsum", "cumprod", "sort", "argsort"))
    repeat, conj, conjugate, nonzero = map(_method, ("repeat", "conj", "conjugate", "nonzero"))
    argpartition, choose, compress = map(_method, ("argpartition", "choose", "compress"))
    searchsorted = _method("searchsorted")

    def __round__(self, decimals: int = 0) -> Value:
        return self.round(decimals)

    def __contains__(self, value: Value) -> bool:
        return value in self.materialize()

    def __format__(self, spec: str) -> str:
        return format(self.materialize(), spec) if spec and not self.shape else format(repr(self), spec)

    def __setitem__(self, index: object, value: object) -> None:
        raise TypeError(
            f"{type(self).__name__} is immutable, as JAX arrays are: `q.at[index].set(value)` makes another"
        )

    def __array_namespace__(self, *, api_version: str | None = None, device: object = None) -> ModuleType:
        del api_version, device
        return jnp

    def __dlpack_device__(self) -> tuple[int, int]:
        return jtu.tree_leaves(self)[0].__dlpack_device__()

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the dense array; `nbytes` has those stored."""
        return self.dtype.itemsize

    @property
    def aval(self) -> ShapedArray:
        return self._abstract_value(self)

    def tobytes(self, order: str = "C") -> bytes:
        return np.asarray(self).tobytes(order)  # pyright: ignore[reportArgumentType]  # NumPy checks it

    # Of leaves. An array without leaves is nowhere, and always ready.

    def copy(self) -> Self:
        """The same array in memory of its own."""
        return jtu.tree_map(jnp.copy, self)

    def block_until_ready(self) -> Self:
        return jax.block_until_ready(self)

    def copy_to_host_async(self) -> None:
        for leaf in jtu.tree_leaves(self):
            leaf.copy_to_host_async()

    def to_device(self, device: Device | jax.sharding.Sharding, *, stream: object = None) -> Self:
        return jtu.tree_map(lambda leaf: leaf.to_device(device, stream=stream), self)

    def delete(self) -> None:
        """Free the memory of all leaves now; a use afterwards raises JAX's error for deleted arrays."""
        for leaf in jtu.tree_leaves(self):
            leaf.delete()

    def is_deleted(self) -> bool:
        return any(leaf.is_deleted() for leaf in jtu.tree_leaves(self))

    def is_ready(self) -> bool:
        return all(leaf.is_ready() for leaf in jtu.tree_leaves(self))

    def devices(self) -> set[Device]:
        return {device for leaf in jtu.tree_leaves(self) for device in leaf.devices()}

    @property
    def device(self) -> Device | jax.sharding.Sharding:
        """The device that holds the array; where there are several, the sharding of the dense array."""
        devices = self.devices()
        return next(iter(devices)) if len(devices) == 1 else self.materialize().sharding

    def platform(self) -> str:
        return jtu.tree_leaves(self)[0].platform()

    def on_device_size_in_bytes(self) -> int:
        return sum(leaf.on_device_size_in_bytes() for leaf in jtu.tree_leaves(self))

    committed = _for_all_leaves("committed")
    is_fully_addressable = _for_all_leaves("is_fully_addressable")
    is_fully_replicated = _for_all_leaves("is_fully_replicated")


def struct(leaf: Leaf) -> jax.ShapeDtypeStruct:
    leaf = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


class _IndexUpdates:
    """`q.at` and `q.at[index]`: keeps the array, since `set` and the like are called after `implicit` has returned."""

    def __init__(self, array: ArrayMethods, index: Value = None) -> None:
        self.array, self.index = array, index

    def __getitem__(self, index: Value) -> _IndexUpdates:
        return _IndexUpdates(self.array, index)

    def __getattr__(self, name: str) -> Callable[..., Value]:
        def update(*args: Value, **kwargs: Value) -> Value:
            return self.array._apply(
                lambda array, *args: getattr(array.at[self.index], name)(*args, **kwargs), self.array, *args
            )

        return update
