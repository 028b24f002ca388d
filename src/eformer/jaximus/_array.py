"""`ImplicitArray`: a pytree that stands for a dense array without holding it."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeGuard, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu
from jax.core import Tracer
from jax.sharding import PartitionSpec

from ._export import make_serializable
from ._manners import ArrayManners, struct
from ._misuse import TREE_FUNCTIONS, check_flattened, getframe
from ._observe import note_materialized, unobserved

STATIC = "static"  # metadata key of a dataclass field that is part of the tree's structure


def aux_field(*, default: Any = dataclasses.MISSING, kw_only: bool = False, **kwargs: Any) -> Any:
    """A dataclass field that is static: hashable, part of the tree's structure, never traced."""
    metadata = {**kwargs.pop("metadata", {}), STATIC: True}
    return dataclasses.field(default=default, kw_only=kw_only, metadata=metadata, **kwargs)


class _Record(NamedTuple):
    """What an array keeps besides its fields: it is part of the tree's structure, as static fields are."""

    given_shape: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # and the ranks that the leaves had then
    leaf_dtypes: tuple[Any, ...] | None = None  # when it was made; None of an array that was not constructed
    misuse: str | None = None  # why it must not be used


class _ShapeNeeded(Exception):
    """`materialize` asked for `self.shape` while the shape was being derived from `materialize`."""


class _ArrayMeta(abc.ABCMeta):
    """Abstract methods, but no virtual subclasses: asking for those makes `isinstance` several times slower."""

    __instancecheck__ = type.__instancecheck__
    __subclasscheck__ = type.__subclasscheck__

    def __setattr__(cls, name: str, value: Any) -> None:
        """Let `@dataclass`, frozen or not, stand above a class that is one already, as every subclass is.

        It may set its own description only once. Its bases have to agree with what it says of being frozen; an array
        that it declares not to be can have attributes set.
        """
        if name == "__dataclass_params__":
            for base in cls.__mro__:
                if isinstance(base, _ArrayMeta):
                    type.__setattr__(base, name, value)
            if "_static_fields" in vars(cls):
                type.__setattr__(cls, "_mutable", not value.frozen)
        elif name not in ("__dataclass_fields__", "__hash__") or "_static_fields" not in vars(cls):
            super().__setattr__(name, value)

    def __repr__(cls) -> str:
        # JAX's functions refuse an array by naming its type, and only so can people learn what would work.
        return (
            f"<class '{cls.__module__}.{cls.__qualname__}', an implicit array: `eformer.jaximus.implicit(f)` takes it>"
        )


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(aux_field, dataclasses.field))
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ImplicitArray(ArrayManners, metaclass=_ArrayMeta):
    """An array given by a recipe: `materialize()` of its leaves.

    A subclass lists its parts as annotated fields and becomes a frozen dataclass and a pytree by itself:
    plain fields are leaves (arrays, or implicit arrays), `aux_field`s are static. Every constructor also
    takes `shape` and `dtype` by keyword. What is not given is derived from `materialize()`, so the shape follows
    when leaves are stacked, sliced, vmapped or scanned over; a subclass whose leaves tell the shape directly
    overrides the `shape` property to save the derivation.

    Outside `implicit` the operators, indexing and methods below take the same rules as inside.

    `commute_ops`: a rule for `op(q, x)` of a commutative primitive also serves `op(x, q)`.
    `warn_on_materialize`: warn, once per class and primitive, when no rule serves and the array is materialized.
    """

    commute_ops: ClassVar[bool] = True
    warn_on_materialize: ClassVar[bool] = True

    _data_fields: ClassVar[tuple[str, ...]]
    _static_fields: ClassVar[tuple[str, ...]]
    _mutable: ClassVar[bool] = False  # the class said `@dataclass` without `frozen=True`

    # Any dtype-like goes in, an `np.dtype` is stored.
    dtype: Any = dataclasses.field(default=None, kw_only=True, metadata={STATIC: True})

    @abc.abstractmethod
    def materialize(self) -> jax.Array:
        """The dense array this one stands for."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own_init = "__init__" in cls.__dict__
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        del cls.__setattr__, cls.__delattr__  # the base's are enough
        for name in ("__eq__", "__repr__"):  # where they are, a second `@dataclass` leaves them alone
            setattr(cls, name, getattr(cls, name))
        if not own_init:
            cls.__init__ = _accepting_shape(cls.__init__)
        if "materialize" in cls.__dict__:
            setattr(cls, "materialize", _checked_materialize(cls.materialize))  # noqa: B010  (pyright: a method)
        fields = dataclasses.fields(cls)
        cls._data_fields = tuple(f.name for f in fields if not f.metadata.get(STATIC))
        cls._static_fields = tuple(f.name for f in fields if f.metadata.get(STATIC))
        flatten = _flattener(cls)
        keys = tuple(map(jtu.GetAttrKey, cls._data_fields))

        def flatten_with_keys(array: ImplicitArray) -> tuple[tuple[tuple[Any, Any], ...], Any]:
            children, aux = flatten(array)
            return tuple(zip(keys, children, strict=True)), aux

        jtu.register_pytree_with_keys(cls, flatten_with_keys, functools.partial(_unflatten, cls), flatten)
        make_serializable(cls, _Record)

    # A shape given to the constructor is kept only where `materialize` itself asks for it (an array of zeros, say),
    # with the ranks the leaves had then: leading axes that leaves gain or lose, the shape gains or loses too.
    @property
    def _given(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        return self._record.given_shape

    @property
    def _record(self) -> _Record:
        return vars(self).get("_kept", _NOTHING)

    def _keep(self, **known: Any) -> None:
        vars(self)["_kept"] = self._record._replace(**known)

    def _settle(self, shape: Sequence[int] | None) -> None:
        """Check what the constructor was given against what the leaves say, and complete it."""
        for name in self._static_fields:
            _check_hashable(self, name)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", jax.dtypes.canonicalize_dtype(self.dtype))
        if shape is not None:
            shape = tuple(operator.index(size) for size in shape)
        if _tells_shape(self):
            derived = self.shape
        else:
            try:
                derived = self._abstract().shape
            except _ShapeNeeded:
                if shape is None:
                    raise ValueError(
                        f"{type(self).__name__} needs `shape=...`: its `materialize` reads `self.shape`"
                    ) from None
                ranks = tuple(np.ndim(leaf) for leaf in jtu.tree_leaves(self))
                self._keep(given_shape=(shape, ranks))
                derived = self._abstract().shape
        if shape is not None and shape != derived:
            raise ValueError(
                f"{type(self).__name__} was given `shape={shape}`, but its leaves make an array of shape {derived}"
            )
        if self.dtype is None:
            object.__setattr__(self, "dtype", self._abstract().dtype)
        elif not _tells_shape(self) and self._abstract().dtype != self.dtype:
            raise ValueError(
                f"{type(self).__name__} was given `dtype={self.dtype}`, but `materialize` returns "
                f"{self._abstract().dtype}: end it with `.astype(self.dtype)`"
            )
        self._keep(leaf_dtypes=tuple(map(_dtype, jtu.tree_leaves(self))))

    def check_leaves(self) -> None:
        """Raise if the leaves are not what the array was made of: every use of the array asks this.

        Functions that map over all leaves of a tree reach codes and scales: what they do to them may have no meaning.
        """
        _, made_of, misuse = self._record
        if misuse is not None:
            raise ValueError(misuse)
        if made_of is None:
            return
        # Most arrays have arrays for all their fields; this is asked of each array of a model whenever it is traced.
        fields = tuple([getattr(getattr(self, name), "dtype", None) for name in self._data_fields])
        if made_of == fields or made_of == tuple([getattr(leaf, "dtype", None) for leaf in jtu.tree_leaves(self)]):
            return
        for (path, leaf), dtype in zip(jtu.tree_leaves_with_path(self), made_of, strict=True):
            if dtype is not None and _dtype(leaf) != dtype:
                raise TypeError(
                    f"the leaf `{jtu.keystr(path).lstrip('.')}` of this {type(self).__name__} is {_dtype(leaf)}, and "
                    f"was {dtype} when the array was made: a function that maps over leaves, such as `jax.tree.map`, "
                    f"has changed it. Of `eformer.jaximus`, `tree_map_with_implicit` maps over whole arrays, and "
                    f"`tree_cast`, `tree_norm`, `tree_average` and `tree_size` do what people most often want"
                )

    def vmap_error(self, leaf: Any, axis: int) -> str | None:
        """Why `jax.vmap` must not take `axis` of this leaf, in words; None if it may. `leaf` is without the axis."""
        del leaf, axis
        return None

    def _abstract(self) -> jax.ShapeDtypeStruct:
        leaves, treedef = jtu.tree_flatten(self)
        return _abstract_materialize(treedef, tuple(map(struct, leaves)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array represented."""
        if self._given is None:
            return self._abstract().shape
        shape, ranks = self._given
        leaves = jtu.tree_leaves(self)
        gained = {np.ndim(leaf) - rank for leaf, rank in zip(leaves, ranks, strict=True)}
        added = gained.pop() if len(gained) == 1 else 0
        return (*jnp.shape(leaves[0])[:added], *shape) if added > 0 else shape[-added:]

    def is_stacked(self) -> bool:
        """Whether slicing every leaf along its first axis slices this array along its first axis.

        `lax.scan` over an array that says yes hands its body the slices still implicit. By default the answer is a
        proof: yes if `materialize` and `vmap(materialize)` trace to the same program.
        """
        leaves, treedef = jtu.tree_flatten(self)
        return _materialize_commutes_with_vmap(treedef, tuple(map(struct, leaves)))

    def deferred(self) -> ImplicitArray | Deferred:
        """What enters a function that is traced apart: this array, or what it can be made of there at less cost."""
        return self

    def divisible(self) -> ImplicitArray:
        """An equal array whose leaves can be divided over devices as it is, if this one's can't."""
        return self

    def leaf_specs(self, spec: PartitionSpec) -> Any:
        """This tree with a `PartitionSpec` for each leaf, such that sharding the leaves so shards the array by `spec`.

        `None` where no such sharding is known; by default only full replication is.
        """
        replicated = all(axis is None for axis in spec)
        return jtu.tree_map(lambda _: PartitionSpec(), self) if replicated else None

    @property
    def __jax_array__(self) -> Callable[[], Any]:
        # Only inside `implicit`: with it, JAX's own operators would make the array dense before `__rmatmul__` is asked.
        from ._trace import lift_closed_over

        return lift_closed_over(self)

    def __repr__(self) -> str:
        try:
            return f"{type(self).__name__}({self.dtype}{list(self.shape)}, {self.nbytes:,} bytes)"
        # Leaves that are no arrays, as JAX puts into trees it only restructures.
        except (AttributeError, TypeError, ValueError, IndexError):
            parts = ", ".join(f"{name}={type(getattr(self, name)).__name__}" for name in self._data_fields)
            return f"{type(self).__name__}({parts})"


def _set_attribute(self: ImplicitArray, name: str, value: Any) -> None:
    if not self._mutable:
        raise dataclasses.FrozenInstanceError(
            f"{type(self).__name__} is a value: `dataclasses.replace(array, {name}=...)` makes another"
        )
    object.__setattr__(self, name, value)


def _delete_attribute(self: ImplicitArray, name: str) -> None:
    if not self._mutable:
        raise dataclasses.FrozenInstanceError(f"{type(self).__name__} is a value: `{name}` can't be deleted")
    object.__delattr__(self, name)


# Set here: the decorator above, which makes a frozen dataclass, wants to define these itself.
setattr(ImplicitArray, "__setattr__", _set_attribute)  # noqa: B010  (pyright: frozen)
setattr(ImplicitArray, "__delattr__", _delete_attribute)  # noqa: B010
ImplicitArray._data_fields, ImplicitArray._static_fields = (), ("dtype",)


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True)
class Deferred:
    """An array that is `make(array)`, which is done where it is needed, or not at all."""

    array: ImplicitArray
    make: Callable[[ImplicitArray], ImplicitArray] = dataclasses.field(metadata={"static": True})


def is_implicit(x: Any) -> TypeGuard[ImplicitArray]:
    """Whether `x` is an implicit array: the `is_leaf` of trees that hold some."""
    return isinstance(x, ImplicitArray)


def materialize(tree: Any) -> Any:
    """`tree` with each implicit array in it made dense; a lone array is a tree too."""
    return jtu.tree_map(lambda x: x.materialize() if is_implicit(x) else x, tree, is_leaf=is_implicit)


def _accepting_shape(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: ImplicitArray, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._settle(shape)

    signature = inspect.signature(init)
    parameters = list(signature.parameters.values())
    given = inspect.Parameter("shape", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Sequence[int] | None")
    parameters.insert(-1, given)  # before `dtype`
    setattr(__init__, "__signature__", signature.replace(parameters=parameters))  # noqa: B010  (pyright: unknown)
    return __init__


def _checked_materialize(function: Callable[[Any], jax.Array]) -> Callable[[Any], jax.Array]:
    @functools.wraps(function)
    def materialize(self: ImplicitArray) -> jax.Array:
        self.check_leaves()
        note_materialized(self)
        dense = function(self)
        if getattr(dense, "weak_type", False):  # the array has a dtype, whatever Python numbers it is made from
            dense = lax.convert_element_type(dense, dense.dtype)
        # Without a dtype the array is being constructed, and this call is to find it out.
        if _tells_shape(self) and (dense.shape, dense.dtype) != (self.shape, self.dtype or dense.dtype):
            raise TypeError(
                f"`{type(self).__name__}.materialize` returned {dense.dtype}{list(dense.shape)} for an array that "
                f"says it is {self.dtype}{list(self.shape)}"
            )
        return dense

    return materialize


def _tells_shape(array: ImplicitArray) -> bool:
    return type(array).shape is not ImplicitArray.shape


def _check_hashable(array: ImplicitArray, name: str) -> None:
    value = getattr(array, name)
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"`{type(array).__name__}.{name}` is static and must be hashable, got {type(value).__name__} {value!r}; "
            f"a tuple would work, or a plain field if it holds arrays"
        ) from None


def _dtype(leaf: Any) -> Any:
    """The dtype that JAX gives the leaf; None if it is no array."""
    dtype = getattr(leaf, "dtype", None)
    return None if dtype is None else jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


class _Deriving(threading.local):
    def __init__(self) -> None:
        self.keys: set[Any] = set()


_deriving = _Deriving()


@functools.lru_cache(maxsize=4096)
def _abstract_materialize(treedef: Any, structs: tuple[jax.ShapeDtypeStruct, ...]) -> jax.ShapeDtypeStruct:
    key = (treedef, structs)
    if key in _deriving.keys:
        raise _ShapeNeeded
    _deriving.keys.add(key)
    try:
        with unobserved():
            return jax.eval_shape(lambda leaves: jtu.tree_unflatten(treedef, leaves).materialize(), structs)
    finally:
        _deriving.keys.remove(key)


@functools.lru_cache(maxsize=4096)
def _materialize_commutes_with_vmap(treedef: Any, structs: tuple[jax.ShapeDtypeStruct, ...]) -> bool:
    def dense(leaves: Any) -> jax.Array:
        return jtu.tree_unflatten(treedef, leaves).materialize()

    lengths = {struct.shape[:1] for struct in structs}
    if len(lengths) != 1 or () in lengths:
        return False
    with unobserved():
        whole = jax.make_jaxpr(dense)(structs)
        try:
            sliced = jax.make_jaxpr(jax.vmap(dense))(structs)
        except (TypeError, ValueError, IndexError, AssertionError):  # not an array any more without that axis
            return False
    same_consts = [np.array_equal(a, b) for a, b in zip(whole.consts, sliced.consts, strict=False)]
    return str(whole) == str(sliced) and all(same_consts)


def _flattener(cls: type[ImplicitArray]) -> Callable[[ImplicitArray], tuple[tuple[Any, ...], Any]]:
    """The leaves and the static part; it runs for each array at each call of a compiled function, so it is short."""
    leaves, static = _getter(cls._data_fields), _getter(cls._static_fields)

    def flatten(array: ImplicitArray) -> tuple[tuple[Any, ...], Any]:
        found = leaves(array)
        if getframe(1).f_globals is TREE_FUNCTIONS:
            check_flattened(cls.__name__, found, getframe(1))
        return found, (static(array), vars(array).get("_kept", _NOTHING))

    return flatten


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda array: ()
    get = operator.attrgetter(*names)
    return get if len(names) > 1 else lambda array: (get(array),)


def _unflatten(cls: type[ImplicitArray], aux: Any, children: Iterable[Any]) -> ImplicitArray:
    # No check and no conversion: JAX puts `None`, `object()` and `ShapeDtypeStruct` into leaves.
    static, record = aux
    array = object.__new__(cls)
    attributes = vars(array)
    attributes.update(zip(cls._data_fields, children, strict=True))
    attributes.update(zip(cls._static_fields, static, strict=True))
    attributes["_kept"] = record
    if cls.vmap_error is not ImplicitArray.vmap_error and record.misuse is None:
        _note_misuse(array)
    return array


_NOTHING = _Record()


def _note_misuse(array: ImplicitArray) -> None:
    """Find out whether `vmap` has just taken an axis off the leaves that it must not take."""
    for name in array._data_fields:
        leaf = getattr(array, name)
        if isinstance(leaf, Tracer) and hasattr(type(leaf), "batch_dim"):  # the tracers of `vmap` have it
            from ._trace import vmapped_axes  # the trace is built on this class

            errors = (array.vmap_error(each, axis) for each, axis in vmapped_axes(leaf))
            if (error := next(filter(None, errors), None)) is not None:
                array._keep(misuse=error)
