"""What was found of the inputs of a model's weights: a small tree by path."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eformer._src.atomic_files import write_file
from eformer._src.text import table
from eformer._src.user_warnings import warn

Axes = tuple[int, ...]


class Moments(NamedTuple):
    """Sums over the inputs of a leaf, where it is contracted over certain axes.

    `squares` and `inputs`, their number, broadcast to the leaf: along an axis of length 1 all elements have the same.
    `moment` has the leaf's axes twice, or is None if it was not asked for, or can't be told.
    """

    squares: Any
    inputs: Any
    moment: Any | None = None


class Statistic:
    """The inputs that a leaf was multiplied by: sums, by the axes of the leaf that were contracted."""

    def __init__(self, shape: tuple[int, ...], uses: Mapping[Axes, Moments]) -> None:
        self.shape, self.uses = tuple(shape), dict(uses)

    @property
    def mean_square(self) -> jax.Array:
        """The mean square of what each element is multiplied by; it broadcasts to the leaf.

        Inputs that are all zero do not count: they reached another expert. A leaf that is contracted over several axes
        has the sum over these uses.
        """
        squares = sum(jnp.asarray(use.squares) for use in self.uses.values())
        return squares / jnp.maximum(self.inputs, 1)

    @property
    def inputs(self) -> jax.Array:
        """How many inputs reached the leaf, or each matrix of a stack; of the use that has most."""
        counts = [jnp.asarray(use.inputs) for use in self.uses.values()]
        found = counts[0]
        for each in counts[1:]:
            found = jnp.maximum(found, each)
        return found

    def second_moment(self, axes: int | Axes) -> jax.Array | None:
        """The mean of x xᵀ over the inputs x that the leaf's `axes`, of n channels, are contracted with: (..., n, n).

        In front are the leaf's other axes, with length 1 where the matrix is the same. None if it was not asked for.
        """
        ndim = len(self.shape)
        given = (axes,) if isinstance(axes, int) else axes
        along = tuple(sorted(axis % ndim - ndim for axis in given))
        use = self.uses.get(along)
        if use is None or use.moment is None:
            return None
        others = [axis for axis in range(ndim) if axis - ndim not in along]
        ours = [axis % ndim for axis in along]
        # The other axes have length 1 for the second factor: it is of the same matrix.
        moment = jnp.asarray(use.moment).transpose(
            *others, *ours, *(ndim + axis for axis in ours), *(ndim + axis for axis in others)
        )
        length = math.prod(self.shape[axis] for axis in ours)
        inputs = jnp.squeeze(jnp.asarray(use.inputs), ours)
        return moment.reshape(*inputs.shape, length, length) / jnp.maximum(inputs, 1)[..., None, None]

    def axes_with_moment(self, axis: int | None = None) -> Axes:
        """The axes that a second moment is of, with `axis` among them if there are several; () if there is none."""
        found = [axes for axes, use in self.uses.items() if use.moment is not None]
        return max(found, key=lambda axes: axis in axes, default=())

    @property
    def has_moment(self) -> bool:
        return any(use.moment is not None for use in self.uses.values())

    def __add__(self, other: Statistic) -> Statistic:
        if self.shape != other.shape:
            raise ValueError(f"statistics of leaves of shapes {self.shape} and {other.shape} can't be merged")
        uses = dict(self.uses)
        for axes, theirs in other.uses.items():
            ours = uses.get(axes)
            uses[axes] = theirs if ours is None else _added(ours, theirs)
        return Statistic(self.shape, uses)

    def __repr__(self) -> str:
        axes = ", ".join(str(each[0]) if len(each) == 1 else str(each) for each in self.uses)
        moment = ", second moment" if self.has_moment else ""
        return f"Statistic({list(self.shape)}, contracted over {axes}, {_inputs(self)} inputs{moment})"


def _added(a: Moments, b: Moments) -> Moments:
    moment = None if a.moment is None or b.moment is None else a.moment + b.moment
    return Moments(a.squares + b.squares, a.inputs + b.inputs, moment)


def _inputs(statistic: Statistic) -> str:
    counts = np.asarray(statistic.inputs)
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


class Statistics(Mapping[str, Statistic]):
    """The statistics of a model's weights by path, and in `missing` why a weight has none.

    `+` merges the statistics of two calibrations of the same model. `save` and `load` keep them in a file of NumPy.
    """

    def __init__(self, found: Mapping[str, Statistic], missing: Mapping[str, str] | None = None) -> None:
        self._found = dict(found)
        self.missing = {path: why for path, why in (missing or {}).items() if path not in self._found}

    def __getitem__(self, path: str) -> Statistic:
        if path not in self._found:
            why = self.missing.get(path)
            known = ", ".join(map(repr, list(self._found)[:3])) or "none"
            raise KeyError(f"no statistics of {path!r}: {why or f'there is no such leaf; some that have are {known}'}")
        return self._found[path]

    def __contains__(self, path: object) -> bool:
        return path in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __add__(self, other: Statistics) -> Statistics:
        if not isinstance(other, Statistics):
            return NotImplemented
        known, theirs = ({*each, *each.missing} for each in (self, other))
        if known and theirs and known != theirs:
            some = ", ".join(map(repr, sorted(known ^ theirs)[:3]))
            raise ValueError(f"these are statistics of different models: only one of them knows {some}")
        found = dict(self)
        for path, statistic in other.items():
            try:
                found[path] = found[path] + statistic if path in found else statistic
            except ValueError as error:
                raise ValueError(f"{path!r}: {error}; were they found of the same model?") from None
        return Statistics(found, {**self.missing, **other.missing})

    merge = __add__

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file of NumPy's (.npz), which `load` reads."""
        arrays: dict[str, np.ndarray] = {}
        for name, statistic in self.items():
            for axes, use in statistic.uses.items():
                key = f"{name}|{','.join(map(str, statistic.shape))}|{','.join(map(str, axes))}"
                arrays.update({f"{key}|{field}": np.asarray(x) for field, x in use._asdict().items() if x is not None})
        reasons = [f"{name}\n{why}" for name, why in self.missing.items()]
        memory = io.BytesIO()
        np.savez(memory, **{"|missing": np.array(reasons, dtype=np.str_), **arrays})
        write_file(Path(path), memory.getvalue(), overwrite=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """The statistics that `save` wrote."""
        found: dict[str, dict[Axes, dict[str, np.ndarray]]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        try:
            with np.load(path, allow_pickle=False) as file:
                missing = dict(each.split("\n", 1) for each in file["|missing"].tolist())
                for key in file.files:
                    if key == "|missing":
                        continue
                    name, shape, axes, field = key.rsplit("|", 3)
                    shapes[name] = tuple(int(n) for n in shape.split(",") if n)
                    of_axes = tuple(int(axis) for axis in axes.split(","))
                    found.setdefault(name, {}).setdefault(of_axes, {})[field] = file[key]
            uses = {
                name: {axes: Moments(**fields) for axes, fields in of_axes.items()} for name, of_axes in found.items()
            }
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)} is no file that `Statistics.save` wrote: {error}") from None
        return cls({name: Statistic(shapes[name], each) for name, each in uses.items()}, missing)

    def __repr__(self) -> str:
        header = ("leaf", "shape", "contracted", "inputs", "largest / mean", "second moment")
        rows = [(path, *_row(statistic)) for path, statistic in self.items()]
        lines = list(table(header, rows, words=1)) if rows else ["no leaf has statistics"]
        for why, paths in _by_reason(self.missing).items():
            lines.append(f"without statistics, {why}: {_some(paths)}")
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw how uneven the channels of each leaf are, the largest mean square by the mean, as an SVG file."""
        from .plot import unevenness

        picture = unevenness({name: _unevenness(each) for name, each in self.items()})
        write_file(Path(path), picture.encode(), overwrite=True)


def _by_reason(missing: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path, why in missing.items():
        found.setdefault(why, []).append(path)
    return found


def _row(statistic: Statistic) -> tuple[str, ...]:
    axes = " and ".join(",".join(map(str, each)) for each in statistic.uses)
    moment = "yes" if statistic.has_moment else "no"
    return str(list(statistic.shape)), axes, _inputs(statistic), f"{_unevenness(statistic):.1f}", moment


def _unevenness(statistic: Statistic) -> float:
    mean_square = np.asarray(statistic.mean_square, np.float64)
    mean = mean_square.mean()
    return float(mean_square.max() / mean) if mean else 1.0


class UncalibratedWarning(UserWarning):
    """A leaf was quantized without statistics, though others have some; or with those of very few inputs."""


def check_statistics(statistics: Statistics, leaves: Sequence[tuple[str, Any]], quantized: Sequence[str]) -> None:
    """Raise a ValueError if these are the statistics of another model; warn of `quantized` leaves that have none."""
    if not isinstance(statistics, Statistics):
        raise TypeError(f"`statistics` must be what `calibrate` returned, got {type(statistics).__name__}")
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves if hasattr(leaf, "shape")}
    for path, statistic in statistics.items():
        if shapes.get(path) != statistic.shape:
            has = f"has the shape {shapes[path]}" if path in shapes else "is not in this model"
            raise ValueError(f"these are statistics of another model: {path!r}, {statistic.shape} there, {has}")
    without: dict[str, list[str]] = {}
    for path in quantized:
        if path not in statistics:
            without.setdefault(statistics.missing.get(path, "these are statistics of another model"), []).append(path)
    if without:
        listed = "; ".join(f"{_some(paths)} ({why})" for why, paths in without.items())
        warn(f"quantized without statistics, as if all inputs were alike: {listed}", UncalibratedWarning)
    few = [path for path in quantized if path in statistics and _is_of_few(statistics[path])]
    if few:
        warn(f"fewer inputs than channels, so second moments tell little: {_some(few)}; give more", UncalibratedWarning)


def _is_of_few(statistic: Statistic) -> bool:
    """Whether a second moment has fewer inputs than channels."""
    channels = [
        math.prod(statistic.shape[axis] for axis in axes)
        for axes, use in statistic.uses.items()
        if use.moment is not None
    ]
    return bool(channels) and float(np.min(np.asarray(statistic.inputs))) < max(channels)


def _some(paths: Sequence[str]) -> str:
    return ", ".join(map(repr, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
