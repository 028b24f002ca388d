"""`QuantizedArray` is what all formats share; `MatmulOperand` adds what kernels and devices have to know."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import tree_util as jtu
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from eformer._src.jaximus.array import ImplicitArray, aux_field
from eformer._src.kernels.matrix import Matrix
from eformer._src.kernels.reference import SMALLEST, cast

from .notebook import array_html
from .sharding import ShardingType, checked_sharding, is_explicit, named_sharding, place
from .validation import FieldChecks, a_bool, a_number_type, check_fields, int8_or_none

Grain = int  # how many elements along an axis an entry of a leaf covers; 0 for a length of 1 that is broadcast
Leaves = dict[str, jax.Array]


_UNLISTED = {"commute_ops", "warn_on_materialize", "is_stacked", "leaf_specs", "reshard", "with_mesh_and_axis"}


class QuantizedArray(ImplicitArray):
    """An implicit array whose leaves are codes and scales.

    `materialize() == decode()` rounded to `dtype`. `use_kernel=False` makes its matmuls decode the whole array first.
    `_field_checks` says what each field may hold; a class has the checks of its bases too.
    """

    _field_checks: ClassVar[FieldChecks] = {
        "use_kernel": a_bool,
        "activation_dtype": int8_or_none,
        "dtype": a_number_type,
    }

    _code_version: ClassVar[int] = 1  # of what the codes stand for, in checkpoints

    use_kernel: bool = aux_field(default=True, kw_only=True)
    activation_dtype: str | None = aux_field(default=None, kw_only=True)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls._field_checks = {
            name: check for base in reversed(cls.__mro__) for name, check in vars(base).get("_field_checks", {}).items()
        }

    _repr_html_ = array_html

    def __post_init__(self) -> None:
        """Complete the fields that a constructor was given, before they are checked."""

    def _construct(self, shape: Sequence[int] | None, sharding: ShardingType = None, **fields: Any) -> None:
        """Do what generated constructors do, in a class that writes its own; lay the leaves out by `sharding`."""
        vars(self).update(fields)
        self.__post_init__()
        self._finish_construction(shape)
        placed = self.with_sharding(sharding)
        vars(self).update({name: getattr(placed, name) for name in self._data_fields})

    def _replaced(self, **fields: Any) -> Self:
        """A copy with these fields; every other field is kept. New leaves are checked as a constructor checks them."""
        copy = object.__new__(type(self))
        kept = {name: getattr(self, name) for name in (*self._data_fields, *self._static_fields)}
        vars(copy).update({**kept, "_kept": self._kept, **fields})
        if not fields.keys().isdisjoint(self._data_fields):
            copy._finish_construction(None)
        return copy

    def _finish_construction(self, shape: Sequence[int] | None) -> None:
        check_fields(self, self._field_checks)
        super()._finish_construction(shape)
        self._check_shapes()

    def _check_shapes(self) -> None:
        """Raise a ValueError unless the shapes of the leaves, whose dtypes are right, make one array together."""

    def _check_codes(self) -> None:
        """Raise a ValueError if leaves, which are NumPy arrays, hold codes that the format does not have."""

    def _recoded(self, version: int) -> Self:
        """This array, whose codes are of an earlier version or today's, in codes of today's."""
        if version != self._code_version:
            raise ValueError(f"codes of {type(self).__name__} have version {self._code_version}, not {version}")
        return self

    def _names_among(self, names: Sequence[str]) -> Sequence[str]:
        """Names among `names` of formats that could have produced this array; `names` make arrays of this class."""
        return names

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
            tiny = SMALLEST if step.dtype == jnp.float32 else 0.0  # what is smaller became zero
            relative, absolute = float(info.eps) / 2, max(float(info.tiny), tiny)
        rounding = 3 * float(jnp.finfo(jnp.float32).eps) + relative
        return step + x * rounding + step * rounding + absolute  # in this order nothing overflows

    @abc.abstractmethod
    def _leaf_shardings(self, sharding: NamedSharding) -> Self:
        """This tree with a sharding in place of each leaf."""

    def materialize(self) -> jax.Array:
        """The dense array, sharded as the leaves are."""
        return self._decoded()

    def _decoded(self) -> jax.Array:
        """`materialize()` without counting as a dense copy, for the part of an array that an operation needs."""
        sharding = self.sharding
        if is_explicit(sharding):
            decode: Any = jax.sharding.auto_axes(_as_dense, out_sharding=sharding)
            return decode(self)
        dense = _as_dense(self)
        return dense if sharding is None else jax.device_put(dense, sharding)

    def with_dtype(self, dtype: DTypeLike) -> Self:
        """The same codes and scales, to be decoded to another dtype."""
        return self._replaced(dtype=jax.dtypes.canonicalize_dtype(dtype))

    def with_activation_dtype(self, activation_dtype: str | None) -> Self:
        """The same array, whose matmuls may round the activations to "int8" where that is faster; None: never.

        On CPU the native core rounds each row of activations in blocks of 32 along the contracted axis, or of 16 where
        blocks of the weights are no multiple of 32: to integers from -127 to 127 times a step, the block's largest
        magnitude / 127. Sums of a block are exact, and blocks are added in float32. So a term is off by at most
        half a step of its activation times the weight; scales along the contracted axis are applied before rounding,
        and the values of NF4 are rounded too, to multiples of absmax / 127, as are those of a registered table that no
        power of two makes small integers. Activations are not rounded where blocks of the weights run along the other
        axis or are no multiple of 16, where a scale varies along both axes, where activations are not finite, and
        without the core. On TPU this holds for INT8.
        """
        int8_or_none("activation_dtype", activation_dtype)
        return self._replaced(activation_dtype=activation_dtype)

    def __dir__(self) -> list[str]:
        """What one does with an array: without what only its class says, second names, and leaves that it has not."""
        absent = {name for name in self._data_fields if getattr(self, name) is None}
        return sorted({*super().__dir__()} - _UNLISTED - absent)

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
        """The same array laid out by `sharding`, which names the array's own axes; None leaves it as it is.

        A leaf takes the part that it can: an axis along which it is shorter than the mesh stays whole. A
        `PartitionSpec` needs a mesh in context (`jax.set_mesh`, or `with mesh:`).
        """
        if sharding is None:
            return self
        traced = any(isinstance(leaf, Tracer) for leaf in jtu.tree_leaves(self))
        placed = self._leaf_shardings(checked_sharding(sharding, self.shape, traced))
        return jtu.tree_map(place, self, placed)

    reshard = with_sharding

    def with_mesh_and_axis(self, mesh_and_axis: tuple[Mesh, PartitionSpec | Sequence[str | None] | str | None]) -> Self:
        """`with_sharding` over a mesh; the spec may be None (replicated), a `PartitionSpec`, a tuple, or one axis."""
        if not isinstance(mesh_and_axis, (tuple, list)) or len(mesh_and_axis) != 2:
            raise TypeError(f"with_mesh_and_axis takes a pair (mesh, axes), got {mesh_and_axis!r}")
        mesh, axes = mesh_and_axis
        if axes is not None and not isinstance(axes, (PartitionSpec, str, tuple, list)):
            raise TypeError(f"the axes must be None, a PartitionSpec, a tuple or a str, got {axes!r}")
        spec = PartitionSpec(axes) if isinstance(axes, str) else PartitionSpec(*(axes or ()))
        return self.with_sharding(named_sharding(mesh, spec))


class MatmulOperand(QuantizedArray):
    """A quantized array whose leaf dimensions each follow one array axis, with a fixed grain along it."""

    _kernel_format: ClassVar[str | None] = None  # the name that kernels know the format by, if there are any

    def _can_become(self, dtype: DTypeLike) -> bool:
        """Whether `astype(dtype)` can change the dtype on record alone, to which decoding rounds."""
        return jnp.issubdtype(dtype, jnp.floating)

    @abc.abstractmethod
    def _named_leaves(self) -> Leaves:
        """The leaves that follow the array's axes, the codes first."""

    @abc.abstractmethod
    def _leaf_axes(self) -> dict[str, tuple[tuple[int, Grain], ...]]:
        """The array axis and the grain of every dimension of every leaf."""

    @abc.abstractmethod
    def _of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[Grain, ...]]) -> Self:
        """The shard of this array that has these shards of the leaves, whose grains may be smaller than before."""

    def _divisible(self) -> Self:
        """An equal array that has only `_named_leaves`, computed without communication between devices."""
        return self

    def _fits_kernels(self) -> bool:
        """Whether kernels can read this array, a matrix or a stack of matrices, as it is stored."""
        return False

    def _stored_matrix(self) -> Matrix:
        """This array (count, rows, cols), whose leaves all have the first axis, as kernels read it."""
        raise NotImplementedError(f"{type(self).__name__} has no kernel that reads a stored matrix")


@jax.jit  # one program: a product and a sum that are compiled together round once, so they must be everywhere
def _as_dense(q: QuantizedArray) -> jax.Array:
    return cast(q.decode(), q.dtype)
