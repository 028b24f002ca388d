"""Which module of an adapter is which leaf of a model, or which matrix of a stack.

The leaf "layers.0.attn.weight" is the module "layers.0.attn". Of a stack "layers.attn.weight", (count, out, in), each
matrix is a module: the place in the stack follows the part of the name that says "layers", "blocks" or "experts".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

ENDS = (".weight", ".kernel", ".embedding", "")  # of the leaf that holds the weight of a module
STACKS = ("layers", "layer", "blocks", "block", "h", "experts")  # parts of names that stacks go by
MAX_PLACES = 4  # numbers in a name that may be places in a stack
# The leaf of an embedding in Flax, or the module of one in torch, which PEFT writes with other names and transposed.
# `embed_out` and `patch_embed` are no embeddings.
EMBEDDING = re.compile(r"\.embedding$|(^|\.)(embed(_tokens|_positions)?|wte|wpe|\w*embeddings?)\.weight$", re.ASCII)
Index = tuple[int, ...]


def is_embedding(name: str) -> bool:
    """Whether the leaf `name` is an embedding, whose rows are looked up."""
    return EMBEDDING.search(name) is not None


def modules_of(name: str, stack: Sequence[int]) -> list[tuple[str, Index]]:
    """The module of each matrix of the leaf `name`, and its place in the `stack`; a ValueError if that is not clear."""
    module = next(name.removesuffix(end) for end in ENDS if name.endswith(end))
    if not stack:
        return [(module, ())]
    parts = module.split(".")
    pairs = itertools.zip_longest(parts, parts[1:], fillvalue="")
    after = [i for i, (part, following) in enumerate(pairs) if part in STACKS and not following.isdecimal()]
    if len(after) != len(stack):
        known = ", ".join(map(repr, STACKS))
        raise ValueError(
            f"{name!r} is a stack of {' x '.join(map(str, stack))} matrices, and PEFT names each of them: its path "
            f"must have one of {known} for each axis of the stack; `save` keeps any tree"
        )

    def named(index: Index) -> str:
        places = dict(zip(after, index, strict=True))
        return ".".join(f"{part}.{places[i]}" if i in places else part for i, part in enumerate(parts))

    return [(named(index), index) for index in itertools.product(*map(range, stack))]


def find_leaf(module: str, shapes: Mapping[str, Sequence[int]]) -> tuple[str, Index] | None:
    """The leaf of this module, and the place in it if it is a stack; None if the model has none."""
    for short, index in _without_places(module):
        for end in ENDS:
            shape = shapes.get(short + end)
            if shape is not None and len(shape) == 2 + len(index):
                inside = all(i < n for i, n in zip(index, shape, strict=False))
                return (short + end, index) if inside else None
    return next(((module + end, ()) for end in ENDS if module + end in shapes), None)


def _without_places(module: str) -> Iterator[tuple[str, Index]]:
    """The name without none, one or several of its numbers, and these numbers."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal() and part.isascii() and len(part) < 10]
    for count in range(min(len(numbers), MAX_PLACES) + 1):
        for places in itertools.combinations(numbers[:MAX_PLACES], count):
            short = ".".join(part for i, part in enumerate(parts) if i not in places)
            yield short, tuple(int(parts[i]) for i in places)
