"""`explain`: what becomes of the implicit arrays in a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import tree_util as jtu

from ._observe import Explanation, explanation, recording
from ._trace import implicit


def explain(function: Callable[..., Any]) -> Callable[..., Explanation]:
    """`explain(f)(*args)`: each primitive that meets an implicit array in `implicit(f)(*args)`, and what served it.

    The rows are (what was met, how often, dense bytes); printed, they are a table. `f` is only traced, not run, so a
    large model costs nothing to explain; if `f` branches on values it is run. What a scan repeats is counted as often
    as it runs; the body of a `while_loop`, whose length is not known, once.
    """

    @functools.wraps(function)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        leaves, treedef = jtu.tree_flatten((args, kwargs))
        traced = [isinstance(leaf, jax.Array) for leaf in leaves]

        def run(arrays: list[jax.Array]) -> Any:
            given = iter(arrays)
            mixed = [next(given) if t else leaf for t, leaf in zip(traced, leaves, strict=True)]
            args, kwargs = jtu.tree_unflatten(treedef, mixed)
            implicit(function)(*args, **kwargs)

        arrays = [leaf for t, leaf in zip(traced, leaves, strict=True) if t]
        try:
            with recording() as recorder:
                jax.eval_shape(run, arrays)
        except jax.errors.ConcretizationTypeError:
            with recording() as recorder:
                run(arrays)
        return explanation(recorder)

    return explained
