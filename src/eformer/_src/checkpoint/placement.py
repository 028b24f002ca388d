"""From a mapped file to devices: each gets its shard, in new memory, and no result keeps looking into the file."""

from __future__ import annotations

import abc
import contextlib
import math
import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from eformer._src.checkpoint.arrays import Value, structs
from eformer._src.checkpoint.file import CheckpointError
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.sharding import checked_sharding

ALIGNMENT = 64  # bytes; JAX on CPU takes memory over from there, and copies any other
OWN_PAGES, HUGE_PAGE = 1 << 16, 1 << 21  # bytes
# Seconds in which a huge page is there. Clearing one takes 0.1 ms, and 512 small ones take 0.7 ms. If it takes longer,
# the system has to make room first; or it is a virtual machine that gave free memory back to its host: 2 to 5 ms.
QUICK = 1e-3


def aligned_copy(view: np.ndarray) -> np.ndarray:
    """A copy whose memory JAX on CPU uses as it is, so that there is one copy and not two."""
    copy = aligned_empty(view.shape, view.dtype)
    copy[...] = view
    return copy


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """New memory that JAX on CPU takes over; its values are arbitrary."""
    return aligned_empties([(shape, dtype)])[0]


def aligned_empties(kinds: Iterable[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
    """Several arrays, of these shapes and dtypes, in one piece of memory, which is freed when all are gone."""
    sized = [(shape, dtype, math.prod(shape) * dtype.itemsize) for shape, dtype in kinds]
    rooms = [-(-nbytes // ALIGNMENT) * ALIGNMENT for _, _, nbytes in sized]
    memory, at, found = _memory(sum(rooms)), 0, []
    for (shape, dtype, nbytes), room in zip(sized, rooms, strict=True):
        found.append(memory[at : at + nbytes].view(dtype).reshape(shape))
        at += room
    return found


def _memory(nbytes: int) -> np.ndarray:
    """Aligned bytes. What is large is in pages of its own, which go back to the system as soon as it is gone."""
    if nbytes < OWN_PAGES or not hasattr(mmap, "MAP_ANONYMOUS"):
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + nbytes]
    huge = nbytes // HUGE_PAGE * HUGE_PAGE if _huge_pages.quick else 0
    pages = mmap.mmap(-1, nbytes + (HUGE_PAGE if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE if huge else 0
    if huge:
        _huge_pages.ask(pages, start, huge)  # the rest would be up to a huge page too much
    return memory[start : start + nbytes]


class _HugePages:
    """Huge pages, as long as they are there more quickly than the small pages in their place.

    The first page of each piece of memory is timed. After one that was slow this process gets small pages.
    """

    def __init__(self) -> None:
        self.quick = hasattr(mmap, "MADV_HUGEPAGE")

    def ask(self, pages: mmap.mmap, start: int, count: int) -> None:
        """Let `count` bytes from `start` on, whole huge pages, be such."""
        with contextlib.suppress(OSError):  # a system without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE, start, HUGE_PAGE)
            begun = time.perf_counter()
            pages[start] = 0
            self.quick = self.quick and time.perf_counter() - begun < QUICK
            if self.quick and count > HUGE_PAGE:
                pages.madvise(mmap.MADV_HUGEPAGE, start + HUGE_PAGE, count - HUGE_PAGE)


_huge_pages = _HugePages()


# One for all arrays, by name, or a function of name and shape; None is the default device.
OneSharding = Sharding | PartitionSpec | None
ShardingFor = OneSharding | Mapping[str, OneSharding] | Callable[[str, tuple[int, ...]], OneSharding]

Index = tuple[slice, ...]


def sharding_for(sharding: ShardingFor, name: str, shape: tuple[int, ...]) -> OneSharding:
    if isinstance(sharding, Mapping):
        sharding = sharding.get(name)
    elif callable(sharding):
        sharding = sharding(name, shape)
    if sharding is not None and not isinstance(sharding, (Sharding, PartitionSpec)):
        raise TypeError(f"the sharding of {name!r} must be a Sharding, a PartitionSpec or None, got {sharding!r}")
    return sharding


class LazyLeaf(abc.ABC):
    """A leaf of a quantized array that is in a file, and not as it will be in memory."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def whole(self) -> Index:
        return tuple(map(slice, self.shape))

    @abc.abstractmethod
    def read(self, index: Index) -> np.ndarray:
        """The part of it that `index` says, in memory that no one else has and that JAX on CPU takes over."""

    @classmethod
    def read_whole(cls, leaves: Sequence[LazyLeaf]) -> list[np.ndarray]:
        """All leaves of an array, as `read` gives them; a class may read them in one pass over the file."""
        return [leaf.read(leaf.whole) for leaf in leaves]


def place(name: str, host: np.ndarray | QuantizedArray, sharding: OneSharding) -> Value:
    """`host`, made of NumPy arrays, on devices; a ValueError if `sharding` can't split it.

    A dense 64-bit array stays a NumPy array unless JAX has 64-bit types enabled: it would be cut to 32 bits.
    """
    try:
        if isinstance(host, QuantizedArray):
            return _place_quantized(host, sharding)
        exact = jax.dtypes.canonicalize_dtype(host.dtype) == host.dtype
        return _place_array(host, _checked(sharding, host.shape)) if exact else np.array(host)
    except (ValueError, TypeError) as error:
        if sharding is None or isinstance(error, CheckpointError):
            raise
        raise ValueError(
            f"{name!r}, {host.dtype}{list(host.shape)}, can't be laid out by {sharding}: {error}"
        ) from error


def _place_quantized(host: QuantizedArray, sharding: OneSharding) -> QuantizedArray:
    leaves, treedef = jtu.tree_flatten(host)
    leaves = [leaf if isinstance(leaf, LazyLeaf) else _canonical(leaf) for leaf in leaves]
    sharding = _checked(sharding, host.shape)
    unread = [leaf for leaf in leaves if isinstance(leaf, LazyLeaf)]
    if sharding is None and unread and len(unread) == len(leaves):
        return jtu.tree_unflatten(treedef, jax.device_put(type(unread[0]).read_whole(unread)))
    if isinstance(sharding, NamedSharding):
        shardings = [leaf.sharding for leaf in jtu.tree_leaves(structs(host).with_sharding(sharding))]
    elif sharding is None or sharding.is_fully_replicated:
        shardings = [sharding] * len(leaves)
    else:
        raise TypeError("a quantized array takes a NamedSharding, a PartitionSpec or one device")
    return jtu.tree_unflatten(treedef, list(map(_place_array, leaves, shardings)))


def _checked(sharding: OneSharding, shape: tuple[int, ...]) -> Sharding | None:
    """`sharding` with its mesh; a ValueError if it does not fit the shape."""
    if isinstance(sharding, (NamedSharding, PartitionSpec)):
        found = checked_sharding(sharding, shape)
        spec = sharding if isinstance(sharding, PartitionSpec) else sharding.spec
        return NamedSharding(found.mesh, spec, memory_kind=found.memory_kind)
    if sharding is not None:
        sharding.shard_shape(shape)  # raises unless it can split the axes
    return sharding


def _canonical(leaf: np.ndarray) -> np.ndarray:
    return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)


def _place_array(view: np.ndarray | LazyLeaf, sharding: Sharding | None) -> jax.Array:
    def read(index: Index | None) -> np.ndarray:
        assert index is not None  # it is, for an array that is not of random keys
        return view.read(index) if isinstance(view, LazyLeaf) else aligned_copy(view[index])

    if sharding is None:
        return jax.device_put(read(tuple(map(slice, view.shape))))
    return jax.make_array_from_callback(view.shape, sharding, read)
