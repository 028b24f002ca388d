"""`calibrate`: run a function on sample inputs, and find what each of its weights is multiplied by."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util as jtu

from eformer._src.jaximus.function import check_function
from eformer._src.model.paths import is_quantized, is_weight
from eformer._src.model.uses.find import traced
from eformer._src.model.uses.rules_from_use import flat_call
from eformer._src.progress import Meter, Progress, progress_bar
from eformer._src.text import in_bytes

from .evaluate import Evaluation, Found, ProgramArray, follow
from .statistics import Moments, Statistic, Statistics

MEMORY = 4 * 10**9  # bytes of second moments that are held at a time


def calibrate(
    function: Callable[..., object],
    *,
    second_moments: bool | str | Collection[str] = False,
    memory: int = MEMORY,
    progress: Progress | bool | None = None,
) -> Callable[..., Statistics]:
    """`calibrate(f)(params, *inputs)`: what each weight in `params` is multiplied by while `f(params, *inputs)` runs.

    The result has, by path, the mean square of each channel that a matmul or a convolution contracts, and names each
    weight that got none with the reason. `quantize_model(..., statistics=...)` takes it. `f` is any JAX function, as it
    is: jits, scans over layers (a row for each), branches, loops, `vmap`, experts, shardings, weights used twice.
    Some leaves may be quantized already: the others then see what became of those.

    An iterator as the only input gives batches: each a tuple of inputs, or the one input. They may have several shapes.
    `second_moments`, which GPTQ needs, are kept for all leaves, for those whose path a regular expression finds, or for
    the given paths; n * n numbers for n channels. Those that exceed `memory` bytes are found in several passes over the
    inputs, and it says in how many. `progress` is called with the batch, bytes of inputs done and in all; True shows a
    bar.

    >>> import jax, jax.numpy as jnp
    >>> from eformer.model import calibrate
    >>> params = {"up": jnp.ones((4, 8)), "bias": jnp.ones(8)}
    >>> calibrate(lambda p, x: jax.nn.relu(x @ p["up"] + p["bias"]))(params, jnp.arange(8.0).reshape(2, 4))
    leaf  shape   contracted  inputs  largest / mean  second moment
    ----  ------  ----------  ------  --------------  -------------
    up    [4, 8]          -2       2             1.7             no
    without statistics, used by add, and in no matmul or convolution: 'bias'
    """

    check_function(function, "calibrate")

    @functools.wraps(function)
    def calibrated(params: object, *inputs: object) -> Statistics:
        batches = as_batches(inputs)
        run = _Run(function, params, batches[0])
        wanted = run.wanted(second_moments)
        sizes = run.moment_bytes(params, batches[0]) if wanted else {}
        passes = _passes({i: sizes[i] for i in wanted}, memory)
        if len(passes) > 1:
            total = sum(sizes[i] for i in wanted)
            print(
                f"second moments of {len(wanted)} leaves take {in_bytes(total)}, and `memory` is {in_bytes(memory)}: "
                f"{len(passes)} passes over the inputs"
            )
        told = progress if callable(progress) else None
        statistics: Statistics | None = None
        with progress_bar("calibrating") if progress is True else contextlib.nullcontext(told) as show:
            meter = Meter(show, sum(map(_bytes_of, batches)) * len(passes))
            for some in passes:
                found = run.over(params, batches, frozenset(some), meter)
                statistics = found if statistics is None else _with_moments_of(statistics, found)
        assert statistics is not None
        return statistics

    return calibrated


def as_batches(inputs: Sequence[object]) -> list[tuple[Any, ...]]:
    """The inputs of each call: one, unless the only input is an iterator."""
    if len(inputs) != 1 or not isinstance(inputs[0], Iterator):
        return [tuple(inputs)]
    batches = [each if isinstance(each, tuple) else (each,) for each in inputs[0]]
    if not batches:
        raise ValueError("the iterator of batches is empty: there is nothing to calibrate with")
    return batches


def _bytes_of(inputs: Sequence[Any]) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(inputs) if hasattr(leaf, "nbytes"))


def _passes(sizes: Mapping[int, int], memory: int) -> list[list[int]]:
    """The leaves that are looked at together, so that their second moments fit."""
    passes: list[list[int]] = [[]]
    left = memory
    for i, size in sizes.items():
        if size > left and passes[-1]:
            passes.append([])
            left = memory
        passes[-1].append(i)
        left -= size
    return passes


def _with_moments_of(statistics: Statistics, other: Statistics) -> Statistics:
    """`statistics`, with second moments of the leaves for which only `other` has some."""
    found = {path: other[path] if other[path].has_moment else each for path, each in statistics.items()}
    return Statistics(found, statistics.missing)


class _Run:
    """The function, traced for each shape of inputs and compiled for each choice of second moments."""

    def __init__(self, function: Callable[..., object], params: object, inputs: Sequence[object]) -> None:
        self.function = function
        self.named, arguments, _ = flat_call(function, params, inputs)
        self.leaves = {i: leaf for i, (_, leaf) in enumerate(self.named) if is_weight(leaf) and not is_quantized(leaf)}
        self.leaves = {i: leaf for i, leaf in self.leaves.items() if leaf.shape and math.prod(leaf.shape)}
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arguments):
            raise TypeError("`calibrate` runs the function, so parameters and inputs must have values")
        self.compiled: dict[object, tuple[Callable[[list[Any]], Found], Evaluation]] = {}
        self.ends: dict[int, dict[str, None]] = {}

    def wanted(self, second_moments: bool | str | Collection[str]) -> list[int]:
        """The leaves whose second moments are asked for."""
        if isinstance(second_moments, bool):
            return list(self.leaves) if second_moments else []
        if isinstance(second_moments, str):
            return [i for i in self.leaves if re.search(second_moments, self.named[i][0])]
        paths = {path: i for i, (path, _) in enumerate(self.named)}
        unknown = [path for path in second_moments if paths.get(path) not in self.leaves]
        if unknown:
            raise ValueError(f"`second_moments` names {unknown[0]!r}, which is no dense weight of the model")
        return [paths[path] for path in second_moments]

    def moment_bytes(self, params: object, inputs: Sequence[Any]) -> dict[int, int]:
        """Bytes of the second moments of each leaf, as the function uses it."""
        arrays, (run, _) = self._program(params, inputs, frozenset(self.leaves))
        found: dict[int, int] = dict.fromkeys(self.leaves, 0)
        for key, sums in jax.eval_shape(run, arrays).items():
            found[key.source] += 0 if sums.moment is None else 4 * math.prod(sums.moment.shape)
        return found

    def over(self, params: object, batches: Iterable[Sequence[Any]], some: frozenset[int], meter: Meter) -> Statistics:
        total: Found = {}
        for number, inputs in enumerate(batches):
            found = self.batch(params, inputs, some)
            self._check_finite(found, number)
            total = found if not total else _merged(total, found)
            meter.add(f"batch {number + 1}", _bytes_of(inputs))
        uses: dict[int, dict[tuple[int, ...], Moments]] = {}
        for key, sums in total.items():
            uses.setdefault(key.source, {})[key.axes] = Moments(*sums)
        of_array: dict[int, Statistic] = {}  # an array that occurs twice has one statistic, of all its uses
        for i, each in uses.items():
            array, statistic = id(self.leaves[i]), Statistic(self.leaves[i].shape, each)
            of_array[array] = of_array[array] + statistic if array in of_array else statistic
        found = {self.named[i][0]: of_array[id(leaf)] for i, leaf in self.leaves.items() if id(leaf) in of_array}
        weights = {path: self._why_missing(i, leaf) for i, (path, leaf) in enumerate(self.named) if is_weight(leaf)}
        unreached = [path for path, each in found.items() if not float(jnp.max(each.inputs))]
        missing = weights | dict.fromkeys(unreached, "no input reached it")
        return Statistics({path: each for path, each in found.items() if path not in unreached}, missing)

    def batch(self, params: object, inputs: Sequence[Any], some: frozenset[int]) -> Found:
        arrays, (run, evaluation) = self._program(params, inputs, some)
        found = run(arrays)
        for i, names in evaluation.ends.items():
            self.ends.setdefault(i, {}).update(names)
        return found

    def _program(
        self, params: object, inputs: Sequence[Any], some: frozenset[int]
    ) -> tuple[list[Any], tuple[Callable[[list[Any]], Found], Evaluation]]:
        _, arguments, call = flat_call(self.function, params, inputs)
        arrays = [x for leaf in arguments for x in jax.tree.leaves(leaf) if hasattr(x, "shape") and hasattr(x, "dtype")]
        kinds = tuple((x.shape, str(x.dtype)) for x in arrays)
        key = (kinds, jtu.tree_structure(arguments, is_leaf=is_quantized), some)
        if key not in self.compiled:
            self.compiled[key] = self._compiled(call, arguments, some)
        return arrays, self.compiled[key]

    def _compiled(
        self, call: Callable[[list[Any]], object], arguments: list[Any], some: frozenset[int]
    ) -> tuple[Callable[[list[Any]], Found], Evaluation]:
        program, whole = traced(call, arguments)
        evaluation = Evaluation(some)

        @jax.jit
        def run(arrays: list[Any]) -> Found:
            evaluation.found.clear()
            given = [follow(i, x) if i in self.leaves else ProgramArray(x) for i, x in zip(whole, arrays, strict=True)]
            evaluation.run(program, given)
            return dict(evaluation.found)

        return run, evaluation

    def _why_missing(self, i: int, leaf: Any) -> str:
        if is_quantized(leaf):
            return "quantized already"
        if i not in self.leaves:
            return "a single number, or empty"
        ends = self.ends.get(i)
        if not ends:
            return "the function does not use it"
        if list(ends) == ["gather"]:
            return "an embedding: the function only gathers from it"
        return f"used by {', '.join(ends)}, and in no matmul or convolution"

    def _check_finite(self, found: Found, number: int) -> None:
        lost = {key: jnp.all(jnp.isfinite(sums.squares)) for key, sums in found.items()}
        for key, finite in jax.device_get(lost).items():
            if not finite:
                raise ValueError(
                    f"the inputs of {self.named[key.source][0]!r} have NaN, infinities or overflow in batch "
                    f"{number} (counted from 0): nothing can be learned from them"
                )


def _merged(total: Found, found: Found) -> Found:
    return {**total, **found, **{key: _added(total[key], found[key]) for key in total.keys() & found.keys()}}


_added = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
