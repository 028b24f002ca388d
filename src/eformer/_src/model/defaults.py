"""The rules that suit most models: large matrices are quantized, with blocks along the contracted axis."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from eformer._src.quantization.registry import Format
from eformer._src.quantization.spelling import FormatLike, read_format
from eformer._src.quantization.validation import an_int

from .axes import AXES, EMBEDDINGS, NORMS_AND_BIASES, contracted_axis
from .paths import Typed
from .rules import Rule

MIN_SIZE = 4096  # elements; smaller leaves are not worth an error
MIN_LENGTH = 32  # elements along the blocks; with fewer, a float32 scale costs more than a bit per element

# Options that a model needs, of formats that have them: ternary weights without a scale lose their magnitude.
_MODEL_OPTIONS = {"scale": "channel"}


@dataclass(frozen=True)
class Matrices:
    """A pattern for large floating point matrices, and stacks of them, whose contracted axis is `axis`."""

    axis: int
    axes: tuple[tuple[str, int], ...]
    min_size: int
    path: str = ""

    def __repr__(self) -> str:
        return f"matrices that are contracted along axis {self.axis}"

    def __call__(self, path: str, leaf: Typed) -> bool:
        shape = leaf.shape
        return (
            len(shape) >= 2
            and jnp.issubdtype(leaf.dtype, jnp.floating)
            and math.prod(shape) >= max(self.min_size, 1)
            and re.search(self.path, path) is not None
            and contracted_axis(path, shape, self.axes) == self.axis
            and shape[self.axis] >= MIN_LENGTH
        )


def default_rules(
    format: FormatLike = "int4",
    *,
    embeddings: FormatLike | None = None,
    min_size: int = MIN_SIZE,
    axes: Sequence[tuple[str, int]] = (),
    **options: object,
) -> tuple[Rule, ...]:
    """Rules that give `format` to the matrices of a model, and to stacks of them, and keep the rest.

    Kept are norms and biases, recognized by name; embeddings, unless `embeddings` names a format for them ("int8"); and
    leaves of fewer than `min_size` elements, or fewer than 32 along the contracted axis. A format with the option
    `axis` gets the contracted axis: -2 for a weight (in, out), -1 for a leaf called "weight" (out, in), the last for
    embeddings. `axes` overrides that with pairs of a regular expression and an axis counted from the end; the first
    that matches wins. A format with the option `scale`, such as ternary, gets a scale per channel. `options` go to
    `format`, before all of these.

    >>> from eformer.model import Rule, default_rules, quantize_model
    >>> rules = (Rule("lm_head", "int8", {"axis": -2}), *default_rules("nf4", block_size=32))
    """
    form, options = read_format(format, options, also=("method", "embeddings", "min_size", "axes"))
    an_int("min_size", min_size)
    layouts = (*axes, *AXES)
    for pattern, axis in layouts:
        if not (isinstance(axis, int) and axis < 0):
            raise ValueError(
                f"the axis of {pattern!r} must count from the end (-2, say): stacks add axes; got {axis!r}"
            )
    found = [Rule(NORMS_AND_BIASES, None, optional=True)]
    if embeddings is not None:
        pattern = Matrices(-1, (("", -1),), min_size, EMBEDDINGS)
        theirs, own = read_format(embeddings)
        found.append(Rule(pattern, theirs, options_along(theirs, -1, own), optional=True))
    found.append(Rule(EMBEDDINGS, None, optional=True))
    for axis in sorted({axis for _, axis in layouts}):
        pattern = Matrices(axis, layouts, min_size)
        found.append(Rule(pattern, form, options_along(form, axis, options), optional=True))
    return tuple(found)


def options_along(form: Format, axis: int | tuple[int, ...], given: Mapping[str, object]) -> dict[str, object]:
    """The options of a format for a weight with blocks along `axis`; those `given` win."""
    wanted = {"axis": axis, **_MODEL_OPTIONS}
    return {**{name: value for name, value in wanted.items() if name in form.options}, **given}
