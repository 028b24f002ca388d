"""What all formats share: the registry, sharding, and the contract between an array and its leaves."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eformer.jaximus import ImplicitArray, aux_field, unobserved
from eformer.kernels.reference import cast

from ._notebook import array_html
from ._validation import Rules, a_bool, a_number_type, check_fields, int8_or_none

ShardingType = NamedSharding | PartitionSpec | None


class QuantizedArray(ImplicitArray):
    """An implicit array whose leaves are codes and scales.

    `materialize() == decode()` rounded to `dtype`. `use_kernel=False` makes its matmuls decode the whole array first.

    `rules` says what each field may hold, in a class together with what its bases say.
    """

    rules: ClassVar[Rules] = {"use_kernel": a_bool, "activation_dtype": int8_or_none, "dtype": a_number_type}

    use_kernel: bool = aux_field(default=True, kw_only=True)
    activation_dtype: str | None = aux_field(default=None, kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.rules = {name: rule for base in reversed(cls.__mro__) for name, rule in vars(base).get("rules", {}).items()}
        if not isinstance(cls.__dict__.get("sharding", property()), property):
            type.__delattr__(
                cls, "sharding"
            )  # the default of an argument of the constructor; the attribute is the property below

    _repr_html_ = array_html

    @classmethod
    def of_fields(cls, values: Mapping[str, Any]) -> Self:
        """The array of these fields, taken as they are; what is wrong with them raises as in the constructor.

        A field that is not named has its default.
        """
        made = object.__new__(cls)
        for field in dataclasses.fields(cls):
            value = values.get(field.name, field.default)
            if value is dataclasses.MISSING or (field.name == "dtype" and value is None):
                raise TypeError(f"{cls.__name__} needs `{field.name}`")
            object.__setattr__(made, field.name, value)
        made._settle(None)
        return made

    def _settle(self, shape: Sequence[int] | None) -> None:
        check_fields(self, self.rules)
        super()._settle(shape)
        self._check_shapes()

    def check(self) -> None:
        """A TypeError or ValueError unless the leaves make one array of this class: trees can be restructured."""
        check_fields(self, self.rules)
        self._check_shapes()

    def _check_shapes(self) -> None:
        """A ValueError unless the leaves, each of which has its dtype, have shapes that make one array together."""

    def check_values(self) -> None:
        """A ValueError if leaves of NumPy arrays hold codes that the format does not have."""

    @abc.abstractmethod
    def decode(self) -> jax.Array:
        """The array in the precision the scales have."""

    @abc.abstractmethod
    def _step_bound(self, original: jax.Array) -> jax.Array:
        """The most by which taking the nearest code can have moved each element of `original`."""

    def error_bound(self, original: jax.Array) -> jax.Array:
        """The most by which `materialize()` can differ from each element of `original`, the array quantized."""
        step = self._step_bound(original)
        x = jnp.abs(original.astype(step.dtype))
        # The quotient, the product and the cast each round once; below `tiny` numbers may be flushed to zero.
        if jnp.issubdtype(self.dtype, jnp.integer):
            relative, absolute = 0.0, 0.5
        else:
            info = jnp.finfo(self.dtype)
            relative, absolute = float(info.eps) / 2, float(info.tiny)
        rounding = 3 * float(jnp.finfo(jnp.float32).eps) + relative
        return step + x * rounding + step * rounding + absolute  # in this order nothing overflows

    @abc.abstractmethod
    def _leaf_shardings(self, sharding: NamedSharding) -> Self:
        """This tree with a sharding in place of each leaf."""

    def materialize(self) -> jax.Array:
        """The dense array, sharded as the leaves are."""
        return self.decoded()

    def decoded(self) -> jax.Array:
        """`materialize()`, without counting as a dense copy: for a part of an array that an operation asks for."""
        sharding = self.sharding
        if is_explicit(sharding):
            decode: Any = jax.sharding.auto_axes(_decoded, out_sharding=sharding)
            return decode(self)
        dense = _decoded(self)
        return dense if sharding is None else jax.device_put(dense, sharding)

    def with_dtype(self, dtype: Any) -> Self:
        """The same codes and scales, to be decoded to another dtype."""
        changed = jtu.tree_map(lambda leaf: leaf, self)
        object.__setattr__(changed, "dtype", jax.dtypes.canonicalize_dtype(dtype))
        return changed

    def with_activation_dtype(self, activation_dtype: str | None) -> Self:
        """The same array, whose matmuls may round what it is multiplied by to "int8" where that is faster; None: never.

        On CPU that is one row of x, for codes packed along the axis that is summed over. The row, times those scales of
        the array that go with its elements, is rounded to 127 steps in either direction of its largest element, and the
        values of NF4 to as many of a block's: each product is off by at most half a step of either. On TPU it is all
        rows, for INT8.
        """
        int8_or_none("activation_dtype", activation_dtype)
        changed = jtu.tree_map(lambda leaf: leaf, self)
        object.__setattr__(changed, "activation_dtype", activation_dtype)
        return changed

    def dequantize(self) -> jax.Array:
        """`materialize()` by another name."""
        return self.materialize()

    @property
    @abc.abstractmethod
    def sharding(self) -> ShardingType:
        """How the array is laid out over devices, as its leaves tell; None on one device, or where JAX decides."""

    @property
    def is_sharded(self) -> bool:
        return self.sharding is not None

    def with_sharding(self, sharding: ShardingType) -> Self:
        """The same array laid out by `sharding`, which speaks of the array's own axes; None leaves it as it is.

        A leaf takes the part that it can: an axis along which it is shorter than the mesh stays whole. A
        `PartitionSpec` needs a mesh in context (`jax.set_mesh`, or `with mesh:`).
        """
        if sharding is None:
            return self
        traced = any(isinstance(leaf, Tracer) for leaf in jtu.tree_leaves(self))
        placed = self._leaf_shardings(checked_sharding(sharding, self.shape, traced))
        return jtu.tree_map(_place, self, placed)

    def reshard(self, sharding: ShardingType) -> Self:
        """`with_sharding` by another name."""
        return self.with_sharding(sharding)

    def with_mesh_and_axis(self, mesh_and_axis: tuple[Mesh, PartitionSpec | Sequence[Any] | str | None]) -> Self:
        """`with_sharding` over a mesh; the spec may be None (replicated), a `PartitionSpec`, a tuple, or one axis."""
        if not isinstance(mesh_and_axis, (tuple, list)) or len(mesh_and_axis) != 2:
            raise TypeError(f"with_mesh_and_axis takes a pair (mesh, axes), got {mesh_and_axis!r}")
        mesh, axes = mesh_and_axis
        if axes is None:
            spec = PartitionSpec()
        elif isinstance(axes, PartitionSpec):
            spec = axes
        elif isinstance(axes, str):
            spec = PartitionSpec(axes)
        elif isinstance(axes, (tuple, list)):
            spec = PartitionSpec(*axes)
        else:
            raise TypeError(f"the axes must be None, a PartitionSpec, a tuple or a str, got {axes!r}")
        return self.with_sharding(named_sharding(mesh, spec))


@jax.jit  # one program: a product and a sum that are compiled together round once, so they must be everywhere
def _decoded(q: QuantizedArray) -> jax.Array:
    return cast(q.decode(), q.dtype)


def laid_out(make: Callable[[jax.Array], QuantizedArray], array: jax.Array) -> Any:
    """`make(array)`, its leaves laid out over devices as the array is."""
    sharding = sharding_of(array)
    if not is_explicit(sharding):
        return make(array).with_sharding(sharding)
    # Where shardings are part of types, JAX would ask each step of `make` for one; what matters is the leaves'.
    leaves = jax.eval_shape(make, jax.ShapeDtypeStruct(array.shape, array.dtype))._leaf_shardings(
        checked_sharding(sharding, array.shape, traced=isinstance(array, Tracer))
    )
    return jax.sharding.auto_axes(make, out_sharding=leaves)(array)


def typed_as(dense: Callable[..., jax.Array], function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function`, which leaves layouts to XLA, where they are part of types: its result has the type `dense` gives."""

    def call(*operands: Any) -> jax.Array:
        with unobserved():  # nothing is made dense to know its type
            sharding = jax.eval_shape(dense, *operands).sharding  # raises as dense JAX does, if that is not clear
        typed: Any = jax.sharding.auto_axes(function, out_sharding=sharding)
        return typed(*operands)

    return call


def asked_of(params: dict[str, Any]) -> set[str]:
    """The parameters of a primitive that ask for something: neither None nor a layout over axes that are XLA's."""
    silent = {name for name, value in params.items() if isinstance(value, NamedSharding) and not is_explicit(value)}
    return {name for name, value in params.items() if value is not None} - silent


def is_explicit(sharding: ShardingType) -> bool:
    """Whether the sharding is part of the array's type, as on meshes with explicit axes."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def named_sharding(mesh: Any, spec: PartitionSpec) -> NamedSharding:
    unknown = [name for entry in spec for name in _names(entry) if name not in mesh.axis_names]
    if unknown:
        raise ValueError(f"{spec} names the axis {unknown[0]!r}, but the mesh has {tuple(mesh.axis_names)}")
    return NamedSharding(mesh, spec)


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def checked_sharding(sharding: Any, shape: tuple[int, ...], traced: bool = False) -> NamedSharding:
    """`sharding` with a mesh and one entry per axis."""
    if isinstance(sharding, PartitionSpec):
        mesh = jax.sharding.get_abstract_mesh() if traced else jax.sharding.get_mesh()
        mesh = _entered_mesh() if mesh.empty else mesh
        if mesh is None:
            raise ValueError(f"{sharding} needs a mesh: give a NamedSharding, or call inside `jax.set_mesh(mesh)`")
        sharding = named_sharding(mesh, sharding)
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"a sharding must be a NamedSharding, a PartitionSpec or None, got {type(sharding).__name__} {sharding!r}"
        )
    if len(sharding.spec) > len(shape):
        raise ValueError(f"{sharding.spec} has {len(sharding.spec)} entries for an array of {len(shape)} axes {shape}")
    spec = PartitionSpec(*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    for axis, (size, entry) in enumerate(zip(shape, spec, strict=True)):
        if size % shards(sharding.mesh, entry):
            raise ValueError(
                f"axis {axis} of length {size} can't be split over {entry!r}, {shards(sharding.mesh, entry)} devices"
            )
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _entered_mesh() -> Any:
    """The mesh of the deprecated `with mesh:`, which JAX tells only by using it; None outside of one."""
    try:
        jaxpr = jax.make_jaxpr(lambda x: lax.with_sharding_constraint(x, PartitionSpec()))(0.0)
    except RuntimeError:
        return None
    return jaxpr.eqns[0].params["sharding"].mesh


def shards(mesh: Any, entry: Any) -> int:
    """Into how many parts an entry of a spec divides its axis."""
    return int(np.prod([mesh.shape[name] for name in _names(entry)], dtype=int))


def sharding_of(leaf: Any) -> Any:
    """A leaf's `NamedSharding`; None if it has none, or if JAX decides it at compile time."""
    aval_sharding = getattr(jax.typeof(leaf), "sharding", None) if isinstance(leaf, jax.Array) else None
    found = aval_sharding if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
    if not isinstance(found, NamedSharding) or found.mesh.empty:
        return None
    return None if isinstance(leaf, Tracer) and not is_explicit(found) else found


def _place(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    if not isinstance(leaf, Tracer):
        return jax.device_put(leaf, sharding)
    if is_explicit(sharding):
        return jax.sharding.reshard(leaf, sharding)
    return lax.with_sharding_constraint(leaf, sharding)


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to quantize, under the name users ask for it by."""

    name: str
    array_type: type[QuantizedArray]
    encode: Callable[..., QuantizedArray]  # (array, **options)

    @property
    def options(self) -> dict[str, Any]:
        """Names and defaults of what `encode` takes besides the array."""
        parameters = list(inspect.signature(self.encode).parameters.values())[1:]
        return {p.name: p.default for p in parameters}

    def __str__(self) -> str:
        return self.name


_formats: dict[str, Format] = {}


def register_format(name: str, array_type: type[QuantizedArray], encode: Callable[..., QuantizedArray]) -> Format:
    """Make `quantize(w, dtype=name)` call `encode(w, **options)`; the tests of all formats run on it from then on."""
    if name in _formats:
        raise ValueError(f"there is a format {name!r} already, made of {_formats[name].array_type.__name__}")
    _formats[name] = Format(name, array_type, encode)
    return _formats[name]


def formats() -> tuple[Format, ...]:
    """All formats, in the order they were registered."""
    return tuple(_formats.values())


_operators: dict[str, type[QuantizedArray]] = {}

C = TypeVar("C", bound=type[QuantizedArray])


def register_array_type(cls: C) -> C:
    """Make a class known that no format makes, so that checkpoints can hold its arrays; a decorator."""
    _operators[cls.__name__] = cls
    return cls


def array_types() -> dict[str, type[QuantizedArray]]:
    """The known classes by name: those of all formats, and those that were registered without one."""
    return {form.array_type.__name__: form.array_type for form in formats()} | _operators


def find_format(name: str) -> Format:
    """The format registered under `name`; a TypeError or ValueError lists the names there are."""
    known = ", ".join(map(repr, _formats))
    if not isinstance(name, str):
        raise TypeError(f"a quantization type is a name, one of {known}, got {type(name).__name__} {name!r}")
    if name not in _formats:
        raise ValueError(f"unknown quantization type {name!r}; there are {known}")
    return _formats[name]


def checked_array(array: Any) -> jax.Array:
    """`array` as a JAX array without gradient; floating point or integer, else a TypeError."""
    if isinstance(array, ImplicitArray):
        array = array.materialize()
    if not hasattr(array, "dtype"):
        raise TypeError(f"quantize takes an array, got {type(array).__name__}; `jnp.asarray` makes one")
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"only floating point and integer arrays can be quantized, got {array.dtype}")
    if jnp.issubdtype(array.dtype, jnp.floating):
        return lax.stop_gradient(jnp.asarray(array))
    if isinstance(array, jax.Array):
        return array
    with jax.ensure_compile_time_eval():  # integers are looked at, where they can be seen
        return jnp.asarray(array)


def normalized_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """`axis`, an int or several, as a sorted tuple of negative ints: leading axes may come and go."""
    axes = (axis,) if isinstance(axis, (int, np.integer)) and not isinstance(axis, bool) else axis
    if not isinstance(axes, (tuple, list)) or not all(
        isinstance(a, (int, np.integer)) and not isinstance(a, bool) for a in axes
    ):
        raise TypeError(f"`axis` must be an int or a tuple of ints, got {axis!r}")
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(f"axis {a} is out of range for an array of {ndim} axes")
    found = sorted(a if a < 0 else a - ndim for a in map(int, axes))
    if len(set(found)) < len(found):
        raise ValueError(f"`axis={axis}` names an axis twice (the array has {ndim} axes)")
    return tuple(found)
