"""Well-formed files that lie, by the thousand with `make fuzz`: each is refused in words, or is what it says it is.

What is loaded is multiplied with, and the product is that of the dense array. No lie takes two seconds, or more memory
than a file of its size may.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.checkpoint import CheckpointError, load
from eformer.jaximus import is_implicit
from eformer.ops.quantization import ArrayGrouped, ArrayPermuted, QuantizedArray

from .lies import LIES, Lie

pytestmark = [
    pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning"),
    pytest.mark.filterwarnings("ignore::eformer.checkpoint.DecodedWarning"),
]
resource = pytest.importorskip("resource", reason="this system does not limit the memory of a process")

PARTS = 2  # in which they are tried, so that processes can share them
SECONDS = 2.0  # of the processor, for one lie
ROOM = 1 << 28  # bytes that the process may grow by while it reads one; a file has some thousand


class Late(Exception):
    pass


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """A block that raises when it takes too long, and is refused memory when it takes too much."""

    def late(*_: object) -> None:
        raise Late

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc/self/statm") else None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, late)
    if pages is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def loaded(source: bytes | Path) -> list[Any] | None:
    """The arrays of a file; None if it is refused. Whatever is raised but a CheckpointError fails the test."""
    try:
        with limited():
            tree = load(source)
    except CheckpointError as error:
        said = str(error)
    else:
        return jax.tree.leaves(tree, is_leaf=is_implicit)
    assert said.isprintable()
    assert len(said) < 2000
    return None


@jax.jit
def product(x: jax.Array, q: Any) -> jax.Array:
    return x @ q


@jax.jit
def dense_of(q: QuantizedArray) -> jax.Array:
    return q.materialize()


def reach(q: QuantizedArray) -> np.ndarray | float:
    """What kernels add to or subtract from each weight: `scale * code - scale * zero` rounds each part."""
    if isinstance(q, ArrayPermuted):
        q = q.array
    if not isinstance(q, ArrayGrouped):
        return 0.0
    steps, offset = jnp.full(q.shape, 2.0**q.bits), q._level("offset")
    largest = q._scaled_blocks(steps, jnp.abs(q._scale()), None, None if offset is None else jnp.abs(offset))
    return np.max(np.asarray(largest, np.float64), axis=-1, keepdims=True, initial=0)


def check_product(q: QuantizedArray) -> None:
    """`x @ q` is what the dense array gives, but for the order of sums; NaN and infinity are in the same columns."""
    dense = dense_of(q)
    assert (dense.shape, dense.dtype) == (q.shape, q.dtype)
    if q.ndim != 2 or 0 in q.shape or not jnp.issubdtype(q.dtype, jnp.floating) or jnp.finfo(q.dtype).bits < 16:
        return
    x = jnp.asarray(np.resize([1.0, -0.5, 0.25], (3, q.shape[0])), q.dtype)
    w, found = np.asarray(dense, np.float64), np.asarray(product(x, q), np.float64)
    bounds = np.abs(np.asarray(x, np.float64)) @ np.maximum(np.abs(w), reach(q))
    sure = bounds < float(jnp.finfo(q.dtype).max) / 4  # else sums may overflow in one order and not in another
    expected = np.asarray(x, np.float64) @ np.where(np.isfinite(w), w, 0)
    # A scale below the smallest normal number may be taken for 0, whatever of up to 128 it multiplies.
    info, terms = jnp.finfo(q.dtype), q.shape[0] + 2
    tolerance = terms * (float(info.eps) * bounds + 128 * float(info.tiny))
    assert np.all(np.abs(found - expected)[sure] <= tolerance[sure])
    assert not np.any(np.isfinite(found[:, np.isnan(w).any(0)]))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_lies(lie: Lie, part: int, tmp_path: Path, pytestconfig: pytest.Config):
    count = pytestconfig.getoption("--lies") // (PARTS * len(LIES))
    os.mkfifo(tmp_path / "pipe.safetensors")
    jax.block_until_ready(jnp.zeros(1) + 1)  # starts the threads of JAX, which take more than a lie may
    rng, opened = random.Random(part), 0
    for _ in range(count):
        found = loaded(lie(rng, tmp_path))
        opened += found is not None
        for array in found or []:
            if isinstance(array, QuantizedArray):
                check_product(array)
    assert count // 50 < opened < count  # if all were refused, or none, this would test little
