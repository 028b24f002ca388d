"""What the path of a leaf tells: norms, embeddings, and the axis of a weight that matmuls sum over."""

from __future__ import annotations

import re
from collections.abc import Sequence

# The parts of a path are separated by dots, or by slashes (Haiku).
_START, _END = r"(^|[./])", r"([./]|$)"
NORMS_AND_BIASES = rf"(?i)norm|{_START}ln(_?\d+|_\w)?{_END}|{_START}(bias\w*|b|scale|offset|gamma|beta)$"
EMBEDDINGS = rf"(?i)embe?d|(^|[._/])emb([._/]|$)|{_START}(wte|wpe){_END}"  # `embd` is how GGUF writes it

# The contracted axis by the path of a leaf; the first pattern that matches and fits the shape wins.
_HEADS = (rf"{_START}(query|key|value)[./]kernel$", -3)  # Flax attention: (features, heads, features per head)
AXES: tuple[tuple[str, int], ...] = (
    _HEADS,
    (rf"{_START}weight(_\w+)?$", -1),  # torch and Equinox: (out, in)
    ("", -2),  # `x @ w` of Flax, Haiku and plain JAX: (in, out)
)


def contracted_axis(path: str, shape: Sequence[int], axes: Sequence[tuple[str, int]] = AXES) -> int:
    """The axis, counted from the end, that a matmul with the weight contracts; of several, the axis for the blocks.

    >>> from eformer._src.model.axes import contracted_axis
    >>> contracted_axis("mlp.kernel", (64, 256)), contracted_axis("mlp.weight", (256, 64))
    (-2, -1)
    """
    for pattern, axis in axes:
        fits = len(shape) >= -axis
        if fits and (pattern, axis) == _HEADS:
            fits = shape[-3] > shape[-2]  # more features than heads; else it is a stack of matrices
        if fits and re.search(pattern, path):
            return axis
    return -1


def default_axis(path: str, shape: Sequence[int]) -> int:
    """The axis of blocks and scales where a rule names none: the last of embeddings, whose rows are looked up."""
    return -1 if re.search(EMBEDDINGS, path) else contracted_axis(path, shape)
