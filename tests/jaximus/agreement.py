"""Whether `implicit` runs a program as dense JAX does: structure, shapes, dtypes, weak types, values, kinds of error.

Values may differ by rounding alone. How far rounding can take a result is measured: the dense program runs again with
random errors of `ROUNDING_ERROR` on the operands and results of all steps that round, and a value may be off by
`MARGIN` times the largest change that this makes. Where such errors flip a comparison, anything goes; elsewhere a wrong
scale, code or element shows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import random as jr
from jax import tree_util as jtu

from eformer.jaximus import implicit, materialize

from .programs import STACKS, Program, made, type_of

ROUNDING_ERROR = 16  # in units of the dtype's epsilon: sums here have up to 64 terms, whose errors add up like a walk
MARGIN = 8
RUNS = 16  # a comparison that either way is as likely stays the same in all of them once in 65,536 times

Function = Callable[..., Any]


def differentiated(function: Function, program: Program) -> Function:
    def loss(*inputs: Any) -> jax.Array:
        floats = [x for x in jtu.tree_leaves(materialize(function(*inputs))) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.mean(x.astype(jnp.float32)) for x in floats), jnp.float32(0))

    return jax.grad(jax.checkpoint(loss) if program.seed % 2 else loss, argnums=2)  # the first that is dense


def mapped(function: Function, program: Program) -> Function:
    return jax.vmap(function, in_axes=tuple(0 if each.stacked else None for each in program.inputs))


def scanned(function: Function, program: Program) -> Function:
    stacked = [each.stacked for each in program.inputs]

    def scan(*inputs: Any) -> Any:
        def body(count: Any, slices: Any) -> Any:
            slices = iter(slices)
            return count + 1, function(*(next(slices) if s else x for s, x in zip(stacked, inputs, strict=True)))

        return lax.scan(body, 0, [x for s, x in zip(stacked, inputs, strict=True) if s])

    return scan


TRANSFORMATIONS: dict[str, Callable[[Function, Program], Function]] = {
    "eager": lambda function, program: function,
    "jit": lambda function, program: jax.jit(function),
    "grad": differentiated,
    "vmap": mapped,
    "scan": scanned,
}
MODES = list(TRANSFORMATIONS)


def mode_of(program: Program) -> str:
    return MODES[program.seed % len(MODES)]


class Disagreement(AssertionError):
    """What `implicit` gives is not what dense JAX gives."""


def inputs_of(program: Program, mode: str) -> tuple[tuple[Any, ...], tuple[jax.Array, ...]]:
    """The inputs, and the same as dense arrays."""
    pairs = [made(each, mode in STACKS) for each in program.inputs]
    return tuple(given for given, _ in pairs), tuple(dense for _, dense in pairs)


def check(program: Program, mode: str) -> None:
    """Raise a `Disagreement` unless `implicit` gives what dense JAX does."""
    given, dense = inputs_of(program, mode)
    run = implicitly(program, mode) if mode == "eager" else jax.jit(implicitly(program, mode))
    try:
        expected = jax.jit(densely(program, mode))(*dense)
    except Exception as error:  # noqa: BLE001  # whatever it is, `implicit` must raise it too
        check_error(lambda: run(*given), error)
        return
    actual = materialize(run(*given))
    if not check_types(actual, expected):
        pairs = list(zip(jtu.tree_leaves(actual), jtu.tree_leaves(expected), strict=True))
        check_values(pairs, noisy_runs(program, mode, dense))


def check_types(actual: Any, expected: Any) -> bool:
    """Raise unless structure and types are the same; whether the values are, but for their own rounding."""
    if jtu.tree_structure(actual) != jtu.tree_structure(expected):
        raise Disagreement(f"{jtu.tree_structure(actual)} in place of {jtu.tree_structure(expected)}")
    pairs = list(zip(jtu.tree_leaves(actual), jtu.tree_leaves(expected), strict=True))
    for a, e in pairs:
        if type_of(a) != type_of(e):
            raise Disagreement(f"{type_of(a)} in place of {type_of(e)}")
    return all(np.allclose(f64(a), f64(e), ROUNDING_ERROR * epsilon(e), 0, equal_nan=True) for a, e in pairs)


def unclear(programs: Sequence[Program]) -> list[tuple[Program, str]]:
    """The programs that `check` has to look at; the others agree. To save time, all are compiled together."""
    pairs = [(program, mode_of(program)) for program in programs]
    sound = [(program, mode) for program, mode in pairs if is_sound(program, mode)]
    whole = [pair for pair in sound if pair[1] != "eager"]

    def run_all(pairs: Any, run: Callable[[Program, str], Function], inputs: Any) -> Any:
        return [run(*pair)(*each) for pair, each in zip(pairs, inputs, strict=True)]

    try:
        dense = [inputs_of(*pair)[1] for pair in sound]
        expected = jax.jit(functools.partial(run_all, sound, densely))(dense)
        together = jax.jit(functools.partial(run_all, whole, implicitly))([inputs_of(*pair)[0] for pair in whole])
        one_by_one = iter(together)
        actual = [implicitly(*p)(*inputs_of(*p)[0]) if p[1] == "eager" else next(one_by_one) for p in sound]
        clear = [check_types(*each) for each in zip(materialize(actual), expected, strict=True)]
    except Exception:  # noqa: BLE001  # `check` finds out which it is
        return pairs
    agreeing = {id(pair[0]) for pair, agrees in zip(sound, clear, strict=True) if agrees}
    return [pair for pair in pairs if id(pair[0]) not in agreeing]


def is_sound(program: Program, mode: str) -> bool:
    try:
        jax.eval_shape(densely(program, mode), *inputs_of(program, mode)[1])
    except Exception:  # noqa: BLE001  # one that `check` expects of `implicit` too
        return False
    return True


def densely(program: Program, mode: str) -> Function:
    return TRANSFORMATIONS[mode](program.function(), program)


def is_inside(program: Program) -> bool:
    """By turns `implicit` is inside of the transformation, and around it."""
    return program.seed // len(MODES) % 2 == 1


def implicitly(program: Program, mode: str) -> Function:
    if is_inside(program):
        return TRANSFORMATIONS[mode](implicit(program.function()), program)
    return implicit(densely(program, mode))


def check_error(call: Callable[[], Any], expected: Exception) -> None:
    try:
        out = call()
    except Exception as error:
        if not isinstance(error, type(expected)) and not isinstance(expected, type(error)):
            raise Disagreement(f"raises {error!r} in place of {expected!r}") from error
    else:
        raise Disagreement(f"gives {out} in place of {expected!r}")


def noisy_runs(program: Program, mode: str, dense: Sequence[jax.Array]) -> list[list[Any]]:
    """Results of the dense program with a rounding error wherever there is one."""

    def run(key: jax.Array, dense: Sequence[jax.Array]) -> Any:
        counter = itertools.count()

        def off(leaf: Any) -> Any:
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                return leaf
            size = ROUNDING_ERROR * float(jnp.finfo(leaf.dtype).eps)
            noise = jr.uniform(jr.fold_in(key, next(counter)), leaf.shape, jnp.float32, -size, size)
            return (leaf.astype(jnp.float32) * (1 + noise)).astype(leaf.dtype)

        return TRANSFORMATIONS[mode](program.function(functools.partial(jtu.tree_map, off)), program)(*dense)

    compiled = jax.jit(run)
    return [jtu.tree_leaves(compiled(jr.key(i), dense)) for i in range(RUNS)]


def check_values(pairs: list[tuple[Any, Any]], noisy: list[list[Any]]) -> None:
    for (a, e), runs in zip(pairs, zip(*noisy, strict=True), strict=True):
        actual, value = np.atleast_1d(f64(a)), np.atleast_1d(f64(e))
        with np.errstate(invalid="ignore", over="ignore"):
            moved = np.max([np.abs(f64(run) - value) for run in runs], axis=0)
            bound = MARGIN * moved + ROUNDING_ERROR * epsilon(e) * np.abs(value)
            near = np.abs(actual - value) <= bound
        unsure = np.any([np.isfinite(f64(run)) != np.isfinite(value) for run in runs], axis=0)
        wrong = ~(near | unsure | (actual == value) | (np.isnan(actual) & np.isnan(value)))
        if np.any(wrong):
            at = tuple(np.argwhere(wrong)[0])
            raise Disagreement(
                f"{actual[at]} in place of {value[at]}, which rounding moves by {moved[at]}; so are {np.sum(wrong)} of "
                f"{wrong.size} elements"
            )


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def epsilon(x: Any) -> float:
    return float(jnp.finfo(x.dtype).eps) if jnp.issubdtype(x.dtype, jnp.floating) else 0.0


def failure(program: Program, mode: str) -> Exception | None:
    """Why this program is wrong under `mode`, if it is."""
    try:
        check(program, mode)
    except Exception as error:  # noqa: BLE001  # one that dense JAX does not raise
        return error
    return None


def shrunk(program: Program, mode: str) -> Program:
    """The first step that is wrong by itself, with what it needs; the program, if none is."""
    parts = (program.first(i) for i in range(len(program.steps)))
    return next((part for part in parts if failure(part, mode) is not None), program)


def snippet(program: Program, mode: str) -> str:
    """What to run, in the folder `tests`, to see what `implicit` makes of this program, and what dense JAX does."""
    names = ", ".join(program.named)
    inside = "run(implicit(program))" if is_inside(program) else "implicit(run(program))"
    return "\n".join(
        [
            f"# seed {program.seed}, under {mode}",
            "from jaximus.agreement import *",
            "from jaximus.programs import *\n",
            *[f"{name} = {each.text(mode in STACKS)}" for name, each in program.named.items()],
            f"\n{program.text()}\n",
            f"run = lambda function: TRANSFORMATIONS[{mode!r}](function, draw({program.seed}))",
            f"print({inside}({names}))",
            f"print(run(program)(*materialize(({names}))))",
        ]
    )
