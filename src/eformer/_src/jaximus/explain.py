"""`explain`: which primitives of a function meet implicit arrays, which rules serve them, and what is made dense."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import tree_util as jtu

from eformer._src.jaximus.function import check_function
from eformer._src.text import table

from .instrumentation import Recorder, ServedPrimitive, mode
from .trace import implicit


class Explanation(tuple[tuple[ServedPrimitive, int, int], ...]):
    """Rows of (primitive, classes, rule, kernel; how often; dense bytes); prints as a table, `remarks` below it."""

    remarks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if not self:
            return "no primitive met an implicit array"
        kernel = ["kernel"] * any(met.kernel for met, *_ in self)  # a column where there are any
        header = ("primitive", "arrays", "rule", *kernel, "times", "dense bytes")
        rows = [
            (met.primitive, ", ".join(met.classes), met.rule, *[met.kernel for _ in kernel], f"{count:,}", f"{dense:,}")
            for met, count, dense in self
        ]
        return "\n".join([*table(header, rows, words=3 + len(kernel)), *self.remarks])

    @property
    def dense_bytes(self) -> int:
        """Bytes of dense arrays made, in all."""
        return sum(dense for _, _, dense in self)


def explain(function: Callable[..., Any]) -> Callable[..., Explanation]:
    """`explain(f)(*args)`: each primitive that meets an implicit array in `implicit(f)(*args)`, and what served it.

    `f` is only traced, not run, so a large model costs nothing to explain; if `f` branches on values it is run. The
    body of a scan is counted as often as it runs; the body of a `while_loop`, whose length is not known, once.
    """

    check_function(function, "explain")

    @functools.wraps(function)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        leaves, treedef = jtu.tree_flatten((args, kwargs))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

        def run(arrays: dict[int, jax.Array]) -> None:
            args, kwargs = jtu.tree_unflatten(treedef, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
            implicit(function)(*args, **kwargs)

        try:
            return _recorded(lambda: jax.eval_shape(run, arrays))
        except jax.errors.ConcretizationTypeError:
            return _recorded(lambda: run(arrays))

    return explained


def _recorded(run: Callable[[], object]) -> Explanation:
    recorder = Recorder()
    with mode(dataclasses.replace(mode.value, recorder=recorder)):
        run()
    counts, dense = recorder.counts, recorder.dense_bytes
    rows = [(met, counts[met], dense[met]) for met in counts | dense]  # the union is without zeros
    explanation = Explanation(sorted(rows, key=lambda row: (-row[2], row[0].primitive)))
    explanation.remarks = tuple(
        f"{text} ({count:,} times)" if count > 1 else text for text, count in recorder.remarks.items()
    )
    return explanation
