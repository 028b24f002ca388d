"""The one error of checkpoints that can't be read."""

from __future__ import annotations

import functools

from eformer._text import printable


class CheckpointError(ValueError):
    """A checkpoint that contradicts itself; the message names the file, the tensor and what is wrong."""

    def __init__(self, what: str, *, file: str | None = None, tensor: str | None = None) -> None:
        # A hostile file chooses its names: they are quoted, and cut before they fill the screen. The rest is made
        # printable, because a path may hold anything too.
        place = [] if file is None else [file]
        if tensor is not None:
            place.append(f"tensor {tensor[:100]!r}")
        super().__init__(printable(": ".join([*place, what])))
        self.what, self.file, self.tensor = what, file, tensor

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(CheckpointError, self.what, file=self.file, tensor=self.tensor), ()
