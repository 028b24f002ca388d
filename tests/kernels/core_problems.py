"""Random calls of the core, and what each must give: the oracle of `reference`, in NumPy, or a refusal.

A call is made right and then, more often than not, spoilt: sizes near 2**63, negative, zero or off by one, other dtypes
and ranks, buffers too many or too few, unknown names. Codes are always any bytes; scales and x may be infinite or NaN.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from eformer.kernels import reference

TERNARY = np.asarray(reference.TERNARY_CODES)
PER_BYTE = {"int8": 1, "nf4": 2, "ternary": 4}
LONGEST = 2**40  # axis that the core takes
HUGE = [-1, -(2**63), 0, 1, 3, 2**31 - 1, 2**31, 2**32 + 2, 2**40 + 1, 2**62, 2**63 - 1, 2**63 - 2]
OTHER_DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "float16", "float32", "float64"]
SPECIAL = np.array([0, -1, np.inf, -np.inf, np.nan, 1e-30], np.float32)


@dataclasses.dataclass
class Call:
    target: str
    args: list[np.ndarray]
    result: np.ndarray
    attributes: dict[str, Any]


def _size(rng: np.random.Generator) -> int:
    """Mostly small, often next to the length of a vector, seldom longer than what is kept in cache."""
    kind = rng.integers(20)
    if kind == 0:
        return int(rng.integers(0, 2))
    if kind < 9:
        return int(rng.integers(1, 20))
    if kind < 17:
        return int(rng.choice([8, 16, 32, 64, 96, 128, 192, 256]) + rng.integers(-2, 3))
    return int(rng.integers(1, 700))


def _floats(rng: np.random.Generator, shape: tuple[int, ...], specials: bool) -> np.ndarray:
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
    if specials and values.size:
        chosen = rng.random(shape) < min(1, 3 / values.size)
        values = np.where(chosen, rng.choice(SPECIAL, shape), values)
    return values


def _bytes(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype, endpoint=True)


def _blocks(rng: np.random.Generator) -> int:
    return int(rng.choice([2, 4, 6, 20, 32, 64, 96, 128, 256, 1024, 2**40, 2**62, 2**63 - 2]))


def random_call(rng: np.random.Generator, instruction_sets: tuple[str, ...]) -> Call:
    """A call that is right."""
    return _segments(rng) if rng.integers(6) == 0 else _matrix(rng, instruction_sets)


def _segments(rng: np.random.Generator) -> Call:
    k = int(rng.integers(1, 17)) if rng.integers(8) == 0 else int(rng.integers(1, 10))
    count, rows, n, blocks = (
        int(rng.integers(0, 3)),
        int(rng.integers(0, 20)),
        _size(rng) // 4,
        int(rng.integers(0, 12)),
    )
    codes = [_bytes(rng, (count, blocks, n), "uint8" if k <= 8 else "uint16") for _ in range(rng.integers(1, 3))]
    x = _floats(rng, (count, rows, n), bool(rng.integers(2)))
    return Call("eformer_segments", [x, *codes], np.empty((count, rows, blocks * k), np.float32), {"k": k})


def _matrix(rng: np.random.Generator, instruction_sets: tuple[str, ...]) -> Call:
    form = str(rng.choice(["int8", "nf4", "ternary"]))
    count, rows, cols = int(rng.choice([0, 1, 1, 1, 2, 3])), _size(rng), _size(rng)
    if rng.integers(40) == 0:
        rows, cols = (int(rng.integers(1, 40)), 4096 + int(rng.integers(-2, 40)))[:: rng.choice([1, -1])]
    packed_axis, contracted_axis = int(rng.integers(2)), int(rng.integers(2))
    block = _blocks(rng)
    extents = [rows, cols]
    extents[packed_axis] = -(-extents[packed_axis] // PER_BYTE[form])
    codes = _bytes(rng, (count, *extents), "int8" if form == "int8" else "uint8")
    sets = ("", *instruction_sets)
    attributes = {
        "format": form,
        "instruction_set": sets[rng.integers(len(sets))],
        "rows": rows,
        "cols": cols,
        "packed_axis": packed_axis,
        "block_size": block,
    }
    scales = _scales(rng, form, count, (rows, cols), packed_axis, block)
    if rng.integers(4) == 0:
        return Call("eformer_decode", [codes, *scales], np.empty((count, rows, cols), np.float32), attributes)
    depth, width = (rows, cols) if contracted_axis == 0 else (cols, rows)
    m = int(rng.choice([0, 1, 1, 1, 2, 5, 13, 17, 40] if rng.integers(20) else [250, 530]))
    x = _floats(rng, (count, m, depth), rng.integers(4) == 0)
    x = x.astype(rng.choice(np.array([np.float32, np.float32, np.float16, ml_dtypes.bfloat16], object)))
    attributes |= {
        "contracted_axis": contracted_axis,
        "round_x": bool(rng.integers(3) == 0),
        "round_values": bool(rng.integers(3) == 0),
    }
    return Call("eformer_matmul", [x, codes, *scales], np.empty((count, m, width), np.float32), attributes)


def _scales(
    rng: np.random.Generator, form: str, count: int, extents: tuple[int, int], packed_axis: int, block: int
) -> list[np.ndarray]:
    specials = bool(rng.integers(4) == 0)
    if form != "nf4":
        shape = (count, *(1 if rng.integers(2) else extent for extent in extents))
        return [_floats(rng, shape, specials)] if rng.integers(4) else []
    shape = (count, *(-(-e // block) if axis == packed_axis else e for axis, e in enumerate(extents)))
    if rng.integers(3):
        return [np.abs(_floats(rng, shape, specials))]
    nested = _floats(rng, (count, -(-math.prod(shape[1:]) // 256)), specials)
    return [_bytes(rng, shape, "uint8"), nested, _floats(rng, (count,), specials), reference.dynamic_map()]


def _zeros(shape: list[int], otherwise: np.ndarray) -> np.ndarray:
    """Zeros of that shape and of the dtype of the other, or the other if there is no memory for them, or no array."""
    possible = math.prod(shape) < 2**22 and math.prod(length or 1 for length in shape) < 2**59
    return np.zeros(shape, otherwise.dtype) if possible else otherwise


def spoil(call: Call, rng: np.random.Generator) -> None:
    """Changes one thing, which may leave it right."""
    kind, args = rng.integers(6), call.args
    at = int(rng.integers(len(args)))
    if kind <= 1:  # an attribute
        name = sorted(call.attributes)[rng.integers(len(call.attributes))]
        value = call.attributes[name]
        if isinstance(value, str):
            call.attributes[name] = str(rng.choice(["", "int8", "nf4", "ternary", "portable", "avx9", "x" * 300]))
        elif not isinstance(value, bool):
            other = int(rng.choice(HUGE)) if rng.integers(2) else value + int(rng.integers(-2, 3))
            call.attributes[name] = max(-(2**63), min(other, 2**63 - 1))
    elif kind == 2:  # a dtype
        args[at] = np.zeros(args[at].shape, str(rng.choice(OTHER_DTYPES)))
    elif kind == 3:  # an extent, or the number of axes
        shape = list(args[at].shape)
        if rng.integers(3) == 0 or not shape:
            shape = shape[:-1] if shape and rng.integers(2) else [*shape, 1]
        else:
            shape[rng.integers(len(shape))] = int(rng.choice([0, 0, 1, 2, 3, *args[at].shape]))
        args[at] = _zeros(shape, args[at])
    elif kind == 4:  # the number of buffers
        args[at : at + 1] = [] if rng.integers(2) and len(args) > 2 else [args[at]] * 2
    else:  # what there is room for
        shape = list(call.result.shape)
        shape[rng.integers(len(shape))] += int(rng.choice([-1, 1]))
        dtype = call.result.dtype if rng.integers(4) else np.dtype(rng.choice(OTHER_DTYPES))
        call.result = np.empty([max(0, length) for length in shape], dtype)
    if rng.integers(8) == 0:  # nothing, of enormous arrays
        shape = [int(rng.choice([0, 2**31, 2**40])) for _ in range(3)]
        shape[rng.integers(3)] = 0
        args[0] = _zeros(shape, args[0])


@dataclasses.dataclass
class Expected:
    """The exact result, how far float32 sums may be from it, and whether every bit counts."""

    values: np.ndarray
    bound: np.ndarray
    exact: bool = False


def expected(call: Call, sets: tuple[str, ...]) -> Expected | None:
    """None if the call is to be refused, on a processor that has these instruction sets."""
    with np.errstate(all="ignore"):
        if call.target == "eformer_segments":
            return _expected_segments(call)
        matrix = _checked_matrix(call, sets)
        if matrix is None:
            return None
        factors, scale = matrix
        values = (factors * scale).astype(np.float32)
        if call.target == "eformer_decode":
            right = call.result.shape == values.shape and call.result.dtype == np.float32
            return Expected(values, np.zeros(1), exact=True) if right else None
        return _expected_matmul(call, factors, scale, values)


def _expected_segments(call: Call) -> Expected | None:
    (x, *codes), k, y = call.args, call.attributes["k"], call.result
    if not 1 <= k <= 16 or len(codes) not in (1, 2) or x.dtype != np.float32 or x.ndim != 3:
        return None
    dtype = np.uint8 if k <= 8 else np.uint16
    count, rows, n = x.shape
    if any(c.dtype != dtype or c.ndim != 3 or (c.shape[0], c.shape[2]) != (count, n) for c in codes):
        return None
    blocks = codes[0].shape[1]
    if any(c.shape[1] != blocks for c in codes) or max(count, rows, n, blocks * k) > LONGEST:
        return None
    if y.dtype != np.float32 or y.shape != (count, rows, blocks * k):
        return None
    if not y.size:
        return Expected(np.zeros(y.shape), np.zeros(y.shape))
    place = k - 1 - np.arange(k)
    bits = [(c.swapaxes(1, 2)[..., None] >> place & 1).reshape(count, n, blocks * k).astype(np.float64) for c in codes]
    x = x.astype(np.float64)
    parts = [x @ each for each in bits]
    # Each sum of 2**k is made of all of x, and added to others of its block.
    bound = (2 * n + 2**k + 4) * np.abs(x).sum(-1, keepdims=True) * np.finfo(np.float32).eps * len(codes)
    return Expected(parts[0] - parts[1] if len(parts) > 1 else parts[0], bound + 1e-30)


def _checked_matrix(call: Call, sets: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    """What codes stand for, and what multiplies them, or None if that is not clear."""
    a = call.attributes
    args = call.args[1:] if call.target == "eformer_matmul" else call.args
    form, rows, cols, axis, block = (a[name] for name in ("format", "rows", "cols", "packed_axis", "block_size"))
    if a["instruction_set"] not in ("", *sets) or rows * cols >= 2**63:
        return None
    if form not in PER_BYTE or axis not in (0, 1) or a.get("contracted_axis", 0) not in (0, 1) or not args:
        return None
    if not 0 <= rows <= LONGEST or not 0 <= cols <= LONGEST or (form == "nf4" and (block < 2 or block % 2)):
        return None
    codes, *scales = args
    extents = [rows, cols]
    extents[axis] = -(-extents[axis] // PER_BYTE[form])
    dtype = np.int8 if form == "int8" else np.uint8
    if codes.dtype != dtype or codes.ndim != 3 or list(codes.shape[1:]) != extents or codes.shape[0] > LONGEST:
        return None
    scale = _checked_scales(form, codes.shape[0], (rows, cols), axis, block, scales)
    if scale is None:
        return None
    count = codes.shape[0]
    if not count * rows * cols:
        return np.empty((count, rows, cols)), np.ones((1, 1, 1))
    if form == "int8":
        return codes.astype(np.float64), scale
    bits = 8 // PER_BYTE[form]
    places = range(0, 8, bits) if form == "ternary" else (4, 0)
    split = np.stack([codes >> place & (2**bits - 1) for place in places], axis + 2)
    merged = split.reshape(count, *(-1 if i == axis else length for i, length in enumerate(extents)))
    found = (TERNARY if form == "ternary" else reference.NF4_CODES)[merged[:, :rows, :cols]]
    return found.astype(np.float64), scale


def _checked_scales(
    form: str, count: int, extents: tuple[int, int], axis: int, block: int, scales: list[np.ndarray]
) -> np.ndarray | None:
    """What broadcasts over the matrices, or None."""
    if form != "nf4":
        if not scales:
            return np.ones((1, 1, 1))
        shape = scales[0].shape
        fits = len(scales) == 1 and scales[0].dtype == np.float32 and len(shape) == 3 and shape[0] == count
        fits = fits and all(found in (1, extent) for found, extent in zip(shape[1:], extents, strict=True))
        return scales[0].astype(np.float64) if fits else None
    shape = (count, *(-(-e // block) if i == axis else e for i, e in enumerate(extents)))
    per_matrix = shape[1] * shape[2]
    wanted = [("float32", shape)]
    if len(scales) == 4:
        nested = (count, -(-per_matrix // 256))
        wanted = [("uint8", shape), ("float32", nested), ("float32", (count,)), ("float32", (256,))]
    if [(s.dtype.name, s.shape) for s in scales] != wanted:
        return None
    found = scales[0]
    if len(scales) == 4:
        flat = scales[3][found.reshape(count, per_matrix)]
        product = flat * np.repeat(scales[1], 256, axis=1)[:, :per_matrix]
        found = (product + scales[2][:, None]).reshape(shape)
    length = extents[axis]
    return np.repeat(found, min(block, max(length, 1)), axis=axis + 1)[:, : extents[0], : extents[1]].astype(np.float64)


def _expected_matmul(call: Call, factors: np.ndarray, scale: np.ndarray, values: np.ndarray) -> Expected | None:
    a, x, y = call.attributes, call.args[0], call.result
    count, rows, cols = values.shape
    depth, width = (rows, cols) if a["contracted_axis"] == 0 else (cols, rows)
    if (
        x.dtype.name not in ("float32", "float16", "bfloat16")
        or x.ndim != 3
        or (x.shape[0], x.shape[2]) != (count, depth)
    ):
        return None
    if y.dtype != np.float32 or y.shape != (count, x.shape[1], width) or x.shape[1] > LONGEST:
        return None
    if not y.size or not depth:
        return Expected(np.zeros(y.shape), np.zeros(1))
    bfloat = x.dtype == ml_dtypes.bfloat16
    x, dense = x.astype(np.float64), values.astype(np.float64)
    if a["contracted_axis"] == 1:
        dense, factors, scale = (array.swapaxes(1, 2) for array in (dense, factors, scale))
    terms = np.abs(x) @ np.abs(dense)
    bound = terms * (depth + 3) * np.finfo(np.float32).eps + 1e-30
    if a["round_values"] and bfloat:  # on AMX
        bound = bound + 2.0**-8 * terms
    if a["round_x"]:  # as docs/cpu-kernels.md says
        of_depth = scale if scale.shape[1] > 1 and scale.shape[2] == 1 else np.ones((1, 1, 1))
        largest = np.abs(x * of_depth.swapaxes(1, 2)).max(2, keepdims=True)
        rest = np.broadcast_to(scale / of_depth if of_depth is not scale else 1.0, dense.shape)
        bound = bound + largest / 254 * (np.abs(factors) * np.abs(rest)).sum(1, keepdims=True)
        if a["format"] == "nf4":
            bound = bound + 0.5 / 127 * (np.abs(x) + largest / 254) @ np.abs(rest)
    return Expected(x @ dense, bound * (1 + 1e-5))


def check(expected: Expected, found: np.ndarray) -> str:
    """What is wrong, or nothing."""
    if expected.exact:
        return "" if np.array_equal(expected.values, found, equal_nan=True) else "the values differ"
    finite = np.isfinite(expected.values)
    if not np.array_equal(finite, np.isfinite(found)):
        return f"finite are {finite.sum()}, and {np.isfinite(found).sum()} are"
    with np.errstate(all="ignore"):
        beyond = (np.abs(found - expected.values) - expected.bound)[finite & np.isfinite(expected.bound)]
    return f"off by {beyond.max()} more than the bound" if beyond.size and beyond.max() > 0 else ""
