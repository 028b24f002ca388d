"""`ImplicitArray`: a pytree that stands for a dense array without holding it."""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Self, TypeGuard, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu
from jax.core import Tracer
from jax.sharding import PartitionSpec

from .array_methods import ArrayMethods, struct
from .calculated import Origin, calculated, is_code, unravels
from .export import make_serializable
from .fields import STATIC, ArrayMeta, aux_field, check_hashable, delete_attribute, make_dataclass, set_attribute
from .instrumentation import note_materialized, unobserved
from .libraries import know_to_flax
from .types import Leaf, Structure, Tree


class _ArrayFacts(NamedTuple):
    """Facts that an array keeps besides its fields; like static fields they are part of the tree's structure."""

    given_shape: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # and the ranks that the leaves had then
    leaf_dtypes: tuple[np.dtype | None, ...] | None = None  # when it was made; None if it was not constructed
    misuse: str | None = None  # why it must not be used
    shapeless: bool = False  # its shape is being derived
    codes: tuple[str, ...] = ()  # its own leaves that held codes when it was made
    origin: Origin = Origin()  # these leaves
    part: int = 0  # with this many elements at most it is a row, or less, of a larger array


_MAPPED = (
    "a function that maps over leaves, such as `jax.tree.map`, has changed it. In `eformer.jaximus`, "
    "`tree_map_with_implicit` maps over whole arrays, and `tree_cast`, `tree_norm`, `tree_average` and `tree_size` do "
    "what people most often want"
)


class _ShapeNeeded(ValueError):
    """`materialize` reads the shape that is to be derived from it."""


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(aux_field, dataclasses.field))
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ImplicitArray(ArrayMethods, metaclass=ArrayMeta):
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
    _kept: ClassVar[_ArrayFacts] = _ArrayFacts()  # `_keep` gives an array its own

    # The constructor takes any dtype-like, and stores an `np.dtype`.
    dtype: Any = dataclasses.field(default=None, kw_only=True, metadata={STATIC: True})

    @abc.abstractmethod
    def materialize(self) -> jax.Array:
        """The dense array this one stands for."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        make_dataclass(cls, lambda array, shape: array._finish_construction(shape))
        if "materialize" in cls.__dict__:
            setattr(cls, "materialize", _checked_materialize(vars(cls)["materialize"]))  # noqa: B010  (pyright: a method)
        flatten = _flattener(cls)
        keys = tuple(map(jtu.GetAttrKey, cls._data_fields))

        def flatten_with_keys(array: ImplicitArray) -> tuple[Iterable[tuple[Hashable, Leaf]], _Static]:
            children, static = flatten(array)
            return tuple(zip(keys, children, strict=True)), static

        unflatten = functools.partial(_unflatten, cls)
        jtu.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        make_serializable(cls, _ArrayFacts)

    def _keep(self, **known: object) -> None:
        vars(self)["_kept"] = self._kept._replace(**known)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _note_codes(self, self._kept, None)

    def _finish_construction(self, shape: Sequence[int] | None) -> None:
        """Check the constructor's `shape` and `dtype` against the leaves, and complete them."""
        know_to_flax(type(self))
        for name in self._static_fields:
            check_hashable(self, name)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", jax.dtypes.canonicalize_dtype(self.dtype))
        given = None if shape is None else tuple(map(operator.index, shape))
        states_shape = _states_shape(self)
        if not states_shape:
            try:
                _derived(self)
            except _ShapeNeeded:
                if given is None:
                    raise
                self._keep(given_shape=(given, tuple(np.ndim(leaf) for leaf in jtu.tree_leaves(self))))
        found = self.shape if states_shape else _derived(self).shape
        if given is not None and given != found:
            raise ValueError(
                f"{type(self).__name__} was given `shape={given}`, but its leaves make an array of shape {found}"
            )
        if self.dtype is None:
            object.__setattr__(self, "dtype", _derived(self).dtype)
        elif not states_shape and _derived(self).dtype != self.dtype:
            raise ValueError(
                f"{type(self).__name__} was given `dtype={self.dtype}`, but `materialize` returns "
                f"{_derived(self).dtype}: end it with `.astype(self.dtype)`"
            )
        codes = tuple(name for name in self._data_fields if is_code(getattr(self, name)))
        self._keep(leaf_dtypes=tuple(map(_dtype, jtu.tree_leaves(self))), codes=codes)
        _note_codes(self, self._kept, None)

    def _is_whole(self) -> bool:
        """Whether all leaves are there: a tree that was split has None in place of some."""
        fields = [getattr(self, name) for name in self._data_fields]
        if not all(field._is_whole() for field in fields if isinstance(field, ImplicitArray)):
            return False
        made_of = self._kept.leaf_dtypes
        return made_of is None or all(f is not None for f in fields) or len(jtu.tree_leaves(self)) == len(made_of)

    def _check_leaves(self) -> None:
        """Raise if the leaves have other dtypes than when the array was made; every use of the array checks this.

        A function that maps over all leaves of a tree reaches codes and scales, and may leave them without a meaning.
        """
        if self._kept.misuse is not None:
            raise ValueError(self._kept.misuse)
        values, made_of = [getattr(self, name) for name in self._data_fields], self._kept.leaf_dtypes
        for value in values:
            if isinstance(value, ImplicitArray):
                value._check_leaves()
        if made_of is None:
            return
        # Most arrays have arrays for all their fields; each array of a model is checked whenever it is traced.
        fields = tuple([getattr(value, "dtype", None) for value in values])
        if made_of == fields or made_of == tuple([getattr(leaf, "dtype", None) for leaf in jtu.tree_leaves(self)]):
            return
        if not self._is_whole():
            there = ", ".join(f"`{jtu.keystr(path).lstrip('.')}`" for path, _ in jtu.tree_leaves_with_path(self))
            raise ValueError(
                f"this {type(self).__name__} has of its leaves {there or 'none'}: the tree was split, and must be "
                f"joined before it is used, by `eqx.combine` or `eformer.model.combine`"
            )
        for (path, leaf), dtype in zip(jtu.tree_leaves_with_path(self), made_of, strict=True):
            if dtype is not None and _dtype(leaf) != dtype:
                raise TypeError(
                    f"the leaf `{jtu.keystr(path).lstrip('.')}` of this {type(self).__name__} is {_dtype(leaf)}, and "
                    f"was {dtype} when the array was made: {_MAPPED}"
                )

    def _is_part(self) -> bool:
        """Whether the array is a row, or less, of a larger one: made dense, it is no dense copy of a weight."""
        return self._kept.part > 0 and self.size <= self._kept.part

    def _vmap_error(self, leaf: jax.Array, axis: int) -> str | None:
        """Why `jax.vmap` must not take `axis` of this leaf, in words; None if it may. `leaf` is without the axis."""
        del leaf, axis
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array represented."""
        if self._kept.shapeless:
            raise _ShapeNeeded(f"{type(self).__name__} needs `shape=...`: its `materialize` reads `self.shape`")
        if self._kept.given_shape is None:
            return _derived(self).shape
        # A shape is kept with the ranks of the leaves: where all leaves gain or lose leading axes, so does the shape.
        shape, ranks = self._kept.given_shape
        leaves = jtu.tree_leaves(self)
        gained = {np.ndim(leaf) - rank for leaf, rank in zip(leaves, ranks, strict=True)}
        added = gained.pop() if len(gained) == 1 else 0
        return (*jnp.shape(leaves[0])[:added], *shape) if added > 0 else shape[-added:]

    def is_stacked(self) -> bool:
        """Whether slicing every leaf along its first axis slices this array along its first axis.

        `lax.scan` over an array that says yes hands its body the slices still implicit. By default the answer is a
        proof: yes if `materialize` and `vmap(materialize)` trace to the same program.
        """
        return _is_stacked(jtu.tree_structure(self), tuple(map(struct, jtu.tree_leaves(self))))

    def _deferred(self) -> ImplicitArray | Deferred:
        """What to pass into a separately traced function: this array, or a cheaper one it can be rebuilt from there."""
        return self

    def _divisible(self) -> ImplicitArray:
        """An equal array whose leaves can be sharded as the array is, if this one's can't."""
        return self

    def _finer(self) -> ImplicitArray:
        """An equal array that can be cut in more places, and may take more memory."""
        return self

    def leaf_specs(self, spec: PartitionSpec) -> Self | None:
        """This tree with a `PartitionSpec` for each leaf: sharding the leaves by these shards the array by `spec`.

        `None` where no such sharding is known; by default only full replication is.
        """
        replicated = all(axis is None for axis in spec)
        return jtu.tree_map(lambda _: PartitionSpec(), self) if replicated else None

    def __repr__(self) -> str:
        try:
            return f"{type(self).__name__}({self.dtype}{list(self.shape)}, {self.nbytes:,} bytes)"
        # Leaves that are no arrays, as JAX puts into trees it only restructures.
        except (AttributeError, TypeError, ValueError, IndexError):
            parts = ", ".join(f"{name}={type(getattr(self, name)).__name__}" for name in self._data_fields)
            return f"{type(self).__name__}({parts})"


# Set here: the decorator above, which makes a frozen dataclass, wants to define these itself.
setattr(ImplicitArray, "__setattr__", set_attribute)  # noqa: B010  (pyright: frozen)
setattr(ImplicitArray, "__delattr__", delete_attribute)  # noqa: B010
ImplicitArray._data_fields, ImplicitArray._static_fields = (), ("dtype",)


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True)
class Deferred:
    """An array that is `make(array)`, which is done where it is needed, or not at all."""

    array: ImplicitArray
    make: Callable[[ImplicitArray], ImplicitArray] = dataclasses.field(metadata={"static": True})


def is_implicit(x: object) -> TypeGuard[ImplicitArray]:
    """Whether `x` is an implicit array: the `is_leaf` of trees that hold some."""
    return isinstance(x, ImplicitArray)


def materialize(tree: Tree) -> Tree:
    """`tree` with each implicit array in it made dense; a lone array is a tree too."""
    return jtu.tree_map(lambda x: x.materialize() if is_implicit(x) else x, tree, is_leaf=is_implicit)


def _checked_materialize(function: Callable[[ImplicitArray], jax.Array]) -> Callable[[ImplicitArray], jax.Array]:
    @functools.wraps(function)
    def materialize(self: ImplicitArray) -> jax.Array:
        self._check_leaves()
        note_materialized(self)
        dense = function(self)
        if getattr(dense, "weak_type", False):  # the array has a dtype, whatever Python numbers it is made from
            dense = lax.convert_element_type(dense, dense.dtype)
        # Without a dtype the array is being constructed, and this call is to find it out.
        if _states_shape(self) and (dense.shape, dense.dtype) != (self.shape, self.dtype or dense.dtype):
            raise TypeError(
                f"`{type(self).__name__}.materialize` returned {dense.dtype}{list(dense.shape)} for an array that "
                f"says it is {self.dtype}{list(self.shape)}"
            )
        return dense

    return materialize


def _states_shape(array: ImplicitArray) -> bool:
    return type(array).shape is not ImplicitArray.shape


def _dtype(leaf: object) -> np.dtype | None:
    """The dtype that JAX gives the leaf; None if it is no array."""
    dtype = getattr(leaf, "dtype", None)
    return None if dtype is None else jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)  # pyright: ignore[reportReturnType]


# What a class need not state is derived: its `materialize` is traced, never run.


def _derived(array: ImplicitArray) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `array.materialize()`, which may read `self.shape` only if the array keeps one."""
    return _struct(jtu.tree_structure(array), tuple(map(struct, jtu.tree_leaves(array))))


@functools.lru_cache(maxsize=4096)
def _struct(treedef: Structure, structs: tuple[jax.ShapeDtypeStruct, ...]) -> jax.ShapeDtypeStruct:
    def dense(leaves: Sequence[jax.Array]) -> jax.Array:
        array: ImplicitArray = jtu.tree_unflatten(treedef, leaves)
        array._keep(shapeless=array._kept.given_shape is None)
        return array.materialize()

    with unobserved():
        return jax.eval_shape(dense, structs)


@functools.lru_cache(maxsize=4096)
def _is_stacked(treedef: Structure, structs: tuple[jax.ShapeDtypeStruct, ...]) -> bool:
    def dense(leaves: Sequence[jax.Array]) -> jax.Array:
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
    # JAX has no equality of programs but of their printed forms.
    same_consts = [np.array_equal(a, b) for a, b in zip(whole.consts, sliced.consts, strict=False)]
    return str(whole) == str(sliced) and all(same_consts)


_Static = tuple[tuple[Hashable, ...], _ArrayFacts]  # values of the static fields, and the record


def _flattener(cls: type[ImplicitArray]) -> Callable[[ImplicitArray], tuple[tuple[Leaf, ...], _Static]]:
    """The function that takes leaves and static part; short, as every compiled call runs it for each array."""
    leaves, static = _getter(cls._data_fields), _getter(cls._static_fields)

    def flatten(array: ImplicitArray) -> tuple[tuple[Leaf, ...], _Static]:
        found = leaves(array)
        if _getframe(1).f_globals is _TREE_FUNCTIONS:
            without_codes = any(getattr(array, name) is None for name in array._kept.codes)
            if _taken_apart(cls.__name__, found, _getframe(1), without_codes):
                found = (jax.ShapeDtypeStruct(array.shape, array.dtype),)
        return found, (static(array), array._kept)

    return flatten


def _getter(names: tuple[str, ...]) -> Callable[[ImplicitArray], tuple[Leaf, ...]]:
    if not names:
        return lambda array: ()
    get = operator.attrgetter(*names)
    return get if len(names) > 1 else lambda array: (get(array),)


def _unflatten(cls: type[ImplicitArray], static: _Static, children: Iterable[Leaf]) -> ImplicitArray:
    # No check and no conversion: JAX puts `None`, `object()` and `ShapeDtypeStruct` into leaves.
    values, record = static
    array = object.__new__(cls)
    attributes = vars(array)
    attributes.update(zip(cls._data_fields, children, strict=True))
    attributes.update(zip(cls._static_fields, values, strict=True))
    attributes["_kept"] = record
    if record.codes and record.misuse is None:
        _note_codes(array, record, _getframe(1))
    if cls._vmap_error is not ImplicitArray._vmap_error and record.misuse is None:
        for leaf in children:
            if isinstance(leaf, Tracer) and hasattr(type(leaf), "batch_dim"):  # the tracers of `vmap` have it
                from .trace import note_misuse  # the trace is built on this class

                note_misuse(array, leaf)
    return array


def _note_codes(array: ImplicitArray, record: _ArrayFacts, frame: FrameType | None) -> None:
    """Keep what codes the array has now; and that it was misused, if they were calculated from those it had before."""
    codes = [getattr(array, name) for name in record.codes]
    before = [leaf() for leaf in getattr(record.origin, "leaves", ())]  # in an exported program it is a plain text
    if len(before) == len(codes) and all(map(operator.is_, before, codes)):
        return
    origin, mapped = Origin(), None
    if all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in codes):
        origin.leaves = tuple(map(weakref.ref, codes))
    vars(array)["_kept"] = record._replace(origin=origin)
    # JAX and this package put arrays together from any leaves, unless they map a function of others over them.
    map_frame = frame
    while frame is not None and frame.f_globals["__name__"] in _TREE_MODULES:
        mapped = frame.f_locals.get("f", mapped)
        frame = frame.f_back
    if frame is None:
        return
    own = [
        name.startswith(_OWN) for name in (frame.f_globals["__name__"], getattr(mapped, "__module__", None) or "jax.")
    ]
    if (all(own) and not unravels(frame)) or len(before) != len(codes):
        return
    changed = calculated(before, codes, map_frame)
    if changed is not None:
        leaf = f"the leaf `{record.codes[changed]}` of this {type(array).__name__}"
        array._keep(misuse=f"{leaf} holds codes, which are no numbers, and was calculated: {_MAPPED}")


_TREE_FUNCTIONS = jtu.tree_map.__globals__  # of the module that has them all
_TREE_MODULES = frozenset({_TREE_FUNCTIONS["__name__"], jax.tree.map.__module__})
_OWN = ("jax.", "jaxlib.", f"{__name__.partition('.')[0]}.")
_getframe = sys._getframe


def _taken_apart(name: str, leaves: Sequence[Leaf], frame: FrameType | None, without_codes: bool) -> bool:
    """Whether the caller of `frame`, a function of `jax.tree`, is Flax, which only looks at the shape of a parameter.

    Raise if it is about to differentiate or optimize codes: `jax.grad` and Optax flatten a tree first. Without this
    they fail in their own words, or train nonsense: the scales alone, of an array whose codes were taken out before
    (`without_codes`).
    """
    while frame is not None and frame.f_globals["__name__"] in _TREE_MODULES:
        frame = frame.f_back
    if frame is None:
        return False
    module, function = frame.f_globals["__name__"], frame.f_code.co_name
    differentiates = function in ("value_and_grad_f", "jacfun") and module.startswith("jax.")
    # `MultiSteps._do_update` chooses between two states of an optimizer, which may be quantized.
    optimizes = module.startswith("optax.") and "mask" not in module and function != "_do_update"
    if not (differentiates or optimizes) or frame.f_locals.get("allow_int", False):
        return module == "flax.core.scope" and function == "param"
    if function == "apply_updates" and not _moves_codes(frame.f_locals):
        return False
    if any(map(is_code, leaves)) or (without_codes and any(leaf is not None for leaf in leaves)):
        what = "differentiated" if differentiates else f"given to Optax's `{function}`"
        raise TypeError(
            f"an {name} cannot be {what}: its codes are no numbers to train. `eformer.model.partition` takes a tree "
            f"apart into what is trained and what is frozen, `eformer.model.add_lora` adds an update to train, and "
            f"`eformer.ops.quantization.straight_through` trains through the rounding of a dense weight"
        )
    return False


def _moves_codes(arguments: Mapping[str, Tree]) -> bool:
    """Whether `apply_updates` would add fractions or other codes to codes; zeros of the same dtype do no harm.

    Under `jit` updates have no values yet, and those of a code's dtype are taken for zeros.
    """
    params, updates = (jtu.tree_leaves(arguments.get(name)) for name in ("params", "updates"))
    return any(is_code(p) and not (is_code(u) and _may_be_zero(u)) for p, u in zip(params, updates, strict=False))


def _may_be_zero(leaf: Leaf) -> bool:
    has_values = isinstance(leaf, (jax.Array, np.ndarray)) and not isinstance(leaf, Tracer)
    return not (has_values and np.any(np.asarray(leaf) != 0))
