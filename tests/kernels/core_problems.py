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

from eformer._src.kernels import grouped, reference

INTEGERS = {f"uint{bits}": bits for bits in grouped.PLANES}
FLOAT8 = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
FLOAT8 |= {f"{name}_blocks": dtype for name, dtype in FLOAT8.items()}
FLOAT_SCALES = ("nf4", "e4m3_blocks", "e5m2_blocks")  # in blocks that have one each, and no offset
CODES = {"int8": np.dtype(np.int8), **FLOAT8}  # dtypes of codes that are their own values; others are uint8
PLANES = {"int8": (8,), "nf4": (4,), "ternary": (2,)} | dict.fromkeys(FLOAT8, (8,))  # bits in each plane
PLANES |= {name: grouped.PLANES[bits] for name, bits in INTEGERS.items()} | dict.fromkeys(grouped.CODEBOOKS, (4,))
GROUPED = (*INTEGERS, *grouped.CODEBOOKS)
# What the other codes stand for.
VALUES = {"nf4": np.asarray(reference.NF4_CODES), "ternary": np.asarray(reference.TERNARY_CODES), **grouped.CODEBOOKS}
VALUES |= {name: np.arange(2**bits, dtype=np.float32) for name, bits in INTEGERS.items()}
WIDE = ("float32", "bfloat16", "float16")  # dtypes of scales
NARROW = ("float8_e8m0fnu", "float8_e4m3fn", "uint8", "int8")
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


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, specials: bool) -> np.ndarray:
    if dtype == "float8_e8m0fnu":  # no powers so large that values overflow where sums of them do not
        return rng.integers(90, 160, shape, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    if dtype in ("uint8", "int8"):
        return _bytes(rng, shape, dtype)
    return _floats(rng, shape, specials).clip(-400, 400).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def random_call(rng: np.random.Generator, instruction_sets: tuple[str, ...]) -> Call:
    """A call that is right."""
    return _segments(rng) if rng.integers(6) == 0 else _matrix(rng, instruction_sets)


def random_matmul(rng: np.random.Generator, instruction_sets: tuple[str, ...], x: np.ndarray) -> Call:
    """A matmul of `x` that is right."""
    return _matrix(rng, instruction_sets, x)


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


def _matrix(rng: np.random.Generator, instruction_sets: tuple[str, ...], x: np.ndarray | None = None) -> Call:
    """A matmul of `x`, or without it a matmul of a random x, or a call that decodes."""
    form = str(rng.choice(["int8", "nf4", "ternary", *FLOAT8] if rng.integers(3) == 0 else GROUPED))
    count, rows, cols = int(rng.choice([0, 1, 1, 1, 2, 3])), _size(rng), _size(rng)
    if rng.integers(40) == 0:
        rows, cols = (int(rng.integers(1, 40)), 4096 + int(rng.integers(-2, 40)))[:: rng.choice([1, -1])]
    packed_axis, contracted_axis = int(rng.integers(2)), int(rng.integers(2))
    if x is not None:
        count, rows, cols = x.shape[0], *((x.shape[2], cols) if contracted_axis == 0 else (rows, x.shape[2]))
    block = _blocks(rng) if form not in GROUPED else int(rng.choice([1, 5, 8, 16, 24, 32, 64, 128, 2**40]))
    shapes = [(count, *_extents(rows, cols, packed_axis, 8 // bits)) for bits in PLANES[form]]
    codes = [_bytes(rng, shape, "uint8").view(CODES.get(form, np.uint8)) for shape in shapes]
    if form in FLOAT8 and rng.integers(2):
        codes = [np.where(np.isfinite(each.astype(np.float32)), each, np.zeros((), each.dtype)) for each in codes]
    sets = ("", *instruction_sets)
    attributes = {
        "format": form,
        "instruction_set": sets[rng.integers(len(sets))],
        "rows": rows,
        "cols": cols,
        "packed_axis": packed_axis,
        "block_size": block,
        "superblock_size": block * int(rng.choice([0, 1, 2, 8])) if block < 2**40 else 0,
    }
    make = _levels if form in GROUPED else _scales
    named = make(rng, form, count, (rows, cols), packed_axis, attributes)
    attributes["scale_names"], scales = " ".join(named), list(named.values())
    if x is None and rng.integers(4) == 0:
        return Call("eformer_decode", [*codes, *scales], np.empty((count, rows, cols), np.float32), attributes)
    depth, width = (rows, cols) if contracted_axis == 0 else (cols, rows)
    x = random_x(rng, count, depth) if x is None else x
    m = x.shape[1]
    attributes |= {
        "contracted_axis": contracted_axis,
        "round_x": bool(rng.integers(3) == 0),
        "round_values": bool(rng.integers(3) == 0),
    }
    return Call("eformer_matmul", [x, *codes, *scales], np.empty((count, m, width), np.float32), attributes)


def random_x(rng: np.random.Generator, count: int, depth: int) -> np.ndarray:
    m = int(rng.choice([0, 1, 1, 1, 2, 5, 13, 17, 40] if rng.integers(20) else [250, 530]))
    x = _floats(rng, (count, m, depth), rng.integers(4) == 0)
    return x.astype(rng.choice(np.array([np.float32, np.float32, np.float16, ml_dtypes.bfloat16], object)))


def _extents(rows: int, cols: int, axis: int, grain: int) -> tuple[int, int]:
    """Of an array with an entry for each `grain` elements along `axis`."""
    return (-(-rows // grain), cols) if axis == 0 else (rows, -(-cols // grain))


def _scales(
    rng: np.random.Generator, form: str, count: int, extents: tuple[int, int], axis: int, attributes: dict[str, Any]
) -> dict[str, np.ndarray]:
    specials = bool(rng.integers(4) == 0)
    if form not in FLOAT_SCALES:
        shape = (count, *(1 if rng.integers(2) else extent for extent in extents))
        return {"scale": _floats(rng, shape, specials)} if rng.integers(4) else {}
    shape = (count, *_extents(*extents, axis, attributes["block_size"]))
    if rng.integers(3):
        return {"scale": np.abs(_floats(rng, shape, specials))}
    nested = _floats(rng, (count, -(-math.prod(shape[1:]) // 256)), specials)
    levels = {"nested": nested, "mean": _floats(rng, (count,), specials), "map": reference.dynamic_map()}
    return {"scale": _bytes(rng, shape, "uint8"), **levels}


def _levels(
    rng: np.random.Generator, _: str, count: int, extents: tuple[int, int], axis: int, attributes: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Scales of blocks in any dtype, perhaps under scales of their own, with zeros, with offsets or alone."""
    shape = (count, *_extents(*extents, axis, attributes["block_size"]))
    superblocks = _extents(*extents, axis, attributes["superblock_size"] or attributes["block_size"])
    named, specials = {}, bool(rng.integers(4) == 0)
    for name in ("scale", "offset")[: rng.integers(1, 3)]:
        small = bool(rng.integers(2))
        dtype = str(rng.choice(NARROW if small else WIDE))
        named[name] = _numbers(rng, shape, dtype, specials)
        if dtype in ("uint8", "int8") or rng.integers(4) == 0:
            over = (count, *(1 if rng.integers(4) == 0 else extent for extent in superblocks))
            named[f"{name}_scale"] = _numbers(rng, over, str(rng.choice(WIDE)), specials)
    if "offset" not in named and rng.integers(2):
        named["zero"] = _bytes(rng, shape, "uint8")
    return named


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
            call.attributes[name] = str(rng.choice(["", "int8", "uint4", "scale", "scale zero", "portable", "x" * 300]))
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
        weights = _checked_matrix(call, sets)
        if weights is None:
            return None
        if call.target == "eformer_decode":
            right = call.result.shape == weights.values.shape and call.result.dtype == np.float32
            return Expected(weights.values, np.zeros(1), exact=True) if right else None
        return _expected_matmul(call, weights)


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


@dataclasses.dataclass
class Weights:
    """Float32 values: `factors * scale`, or what blocks with offsets stand for."""

    values: np.ndarray
    factors: np.ndarray
    scale: np.ndarray
    terms: np.ndarray  # magnitudes of what is added up in place of a value


def _checked_matrix(call: Call, sets: tuple[str, ...]) -> Weights | None:
    """What the codes stand for, or None if that is not clear."""
    a = call.attributes
    args = call.args[1:] if call.target == "eformer_matmul" else call.args
    form, rows, cols, axis, block = (a[name] for name in ("format", "rows", "cols", "packed_axis", "block_size"))
    if a["instruction_set"] not in ("", *sets) or rows * cols >= 2**63:
        return None
    if form not in PLANES or axis not in (0, 1) or a.get("contracted_axis", 0) not in (0, 1) or not args:
        return None
    if not 0 <= rows <= LONGEST or not 0 <= cols <= LONGEST:
        return None
    if form in (*FLOAT_SCALES, *GROUPED):
        unit = 2 if form in FLOAT_SCALES else 1
        if block < unit or block % unit or a["superblock_size"] < 0 or a["superblock_size"] % block:
            return None
    planes, scales = args[: len(PLANES[form])], args[len(PLANES[form]) :]
    dtype = CODES.get(form, np.uint8)
    count = args[0].shape[0] if args[0].ndim else 0
    wanted = [(count, *_extents(rows, cols, axis, 8 // bits)) for bits in PLANES[form]]
    if [plane.shape for plane in planes] != wanted or any(plane.dtype != dtype for plane in planes) or count > LONGEST:
        return None
    names = a["scale_names"].split(" ") if a["scale_names"] else []
    if a["scale_names"].endswith(" ") or len(set(names)) < len(names) or len(names) != len(scales):
        return None
    named = dict(zip(names, scales, strict=True))
    checked = _checked_levels if form in GROUPED and "map" not in named else _checked_scales
    levels = checked(form, count, (rows, cols), a, named)
    if levels is None:
        return None
    if not count * rows * cols:
        empty = np.empty((count, rows, cols), np.float32)
        return Weights(empty, empty, np.ones((1, 1, 1)), empty)
    if form in CODES:
        found = planes[0].astype(np.float32)
    else:
        codes, below = np.zeros((count, rows, cols), np.uint8), 0
        for plane, bits in zip(planes, PLANES[form], strict=True):
            places = range(0, 8, bits) if form != "nf4" else (4, 0)
            split = np.stack([plane >> place & (2**bits - 1) for place in places], axis + 2)
            merged = split.reshape(count, *(-1 if i == axis else length for i, length in enumerate(plane.shape[1:])))
            codes = codes | merged[:, :rows, :cols] << below
            below += bits
        found = VALUES[form][codes].astype(np.float32)
    if form in GROUPED:
        return _of_blocks(form, found, {name: level.astype(np.float32) for name, level in levels.items()})
    scale = levels["scale"]
    values = (found.astype(np.float64) * scale).astype(np.float32)
    return Weights(values, found.astype(np.float64), scale, np.abs(values))


def _of_blocks(form: str, found: np.ndarray, levels: dict[str, np.ndarray]) -> Weights:
    """`scale * (value - zero) + offset`, rounded after each operation; integers that have neither are centred."""
    scale, zero, offset = (levels.get(name) for name in ("scale", "zero", "offset"))
    assert scale is not None
    centre = np.float32(2 ** (INTEGERS[form] - 1) if form in INTEGERS and zero is None and offset is None else 0)
    values = (found - (centre if zero is None else zero)) * scale
    if offset is not None:
        values = values + offset
    span = np.abs(VALUES[form]).max() + (0 if zero is None else zero)
    terms = 2 * np.abs(scale).astype(np.float64) * span + (0 if offset is None else np.abs(offset))
    return Weights(values, found.astype(np.float64), scale, np.broadcast_to(terms, values.shape))


def _checked_levels(
    _: str, count: int, extents: tuple[int, int], attributes: dict[str, Any], named: dict[str, np.ndarray]
) -> dict[str, np.ndarray] | None:
    """Scales, zeros and offsets for each value, in float32; None if they do not fit."""
    axis, block = attributes["packed_axis"], attributes["block_size"]
    shape = (count, *_extents(*extents, axis, block))
    over = (count, *_extents(*extents, axis, attributes["superblock_size"] or block))
    allowed = {"scale", "scale_scale"} | ({"zero"} if "zero" in named else {"offset"})
    allowed |= {"offset_scale"} if "offset" in named else set()
    if "scale" not in named or not set(named) <= allowed:
        return None
    levels = {}
    for name in ("scale", "zero", "offset"):
        leaf, of_leaf = named.get(name), named.get(f"{name}_scale")
        if leaf is None:
            continue
        dtypes = ("uint8",) if name == "zero" else (*WIDE, *NARROW[: 2 if of_leaf is None else 4])
        if leaf.shape != shape or leaf.dtype.name not in dtypes:
            return None
        wide = leaf.astype(np.float32)
        if of_leaf is not None:
            fits = of_leaf.ndim == 3 and of_leaf.shape[0] == count and of_leaf.dtype.name in WIDE
            if not fits or any(n not in (1, m) for n, m in zip(of_leaf.shape[1:], over[1:], strict=True)):
                return None
            factor = of_leaf.astype(np.float32)
            if factor.shape[axis + 1] > 1:
                per_factor = min((attributes["superblock_size"] or block) // block, max(shape[axis + 1], 1))
                factor = np.repeat(factor, per_factor, axis + 1)
                factor = factor[:, : shape[1]] if axis == 0 else factor[..., : shape[2]]
            if wide.size:
                wide = wide * factor
        length = extents[axis]
        levels[name] = np.repeat(wide, min(block, max(length, 1)), axis + 1)[:, : extents[0], : extents[1]]
    return levels


def _checked_scales(
    form: str, count: int, extents: tuple[int, int], attributes: dict[str, Any], named: dict[str, np.ndarray]
) -> dict[str, np.ndarray] | None:
    """What broadcasts over the matrices, or None."""
    axis, block = attributes["packed_axis"], attributes["block_size"]
    if form not in (*FLOAT_SCALES, *GROUPED):
        if not named:
            return {"scale": np.ones((1, 1, 1))}
        if list(named) != ["scale"]:
            return None
        shape = named["scale"].shape
        fits = named["scale"].dtype == np.float32 and len(shape) == 3 and shape[0] == count
        fits = fits and all(found in (1, extent) for found, extent in zip(shape[1:], extents, strict=True))
        return {"scale": named["scale"].astype(np.float64)} if fits else None
    shape = (count, *_extents(*extents, axis, block))
    per_matrix = shape[1] * shape[2]
    wanted = {"scale": ("float32", shape)}
    if "map" in named:
        nested = (count, -(-per_matrix // 256))
        wanted = {"scale": ("uint8", shape), "nested": ("float32", nested)}
        wanted |= {"mean": ("float32", (count,)), "map": ("float32", (256,))}
    if {name: (s.dtype.name, s.shape) for name, s in named.items()} != wanted:
        return None
    found = named["scale"]
    if "map" in named:
        flat = named["map"][found.reshape(count, per_matrix)]
        product = flat * np.repeat(named["nested"], 256, axis=1)[:, :per_matrix]
        found = (product + named["mean"][:, None]).reshape(shape)
    length = extents[axis]
    spread = np.repeat(found, min(block, max(length, 1)), axis=axis + 1)[:, : extents[0], : extents[1]]
    return {"scale": spread.astype(np.float64)}


def _expected_matmul(call: Call, weights: Weights) -> Expected | None:
    a, x, y = call.attributes, call.args[0], call.result
    factors, scale, largest_terms = weights.factors, weights.scale, weights.terms
    count, rows, cols = weights.values.shape
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
    x, dense = x.astype(np.float64), weights.values.astype(np.float64)
    if a["contracted_axis"] == 1:
        arrays = (dense, factors, scale, largest_terms)
        dense, factors, scale, largest_terms = (array.swapaxes(1, 2) for array in arrays)
    terms = np.abs(x) @ largest_terms
    bound = terms * (depth + 3) * np.finfo(np.float32).eps + 1e-30
    if a["round_values"] and bfloat:  # on AMX
        bound = bound + 2.0**-8 * terms
    if a["round_x"]:  # as docs/cpu-kernels.md says
        in_blocks = a["format"] in (*FLOAT_SCALES, *GROUPED)
        scales_x = not in_blocks and scale.shape[1] > 1 and scale.shape[2] == 1
        of_depth = scale if scales_x else np.ones((1, 1, 1))
        largest = np.abs(x * of_depth.swapaxes(1, 2)).max(2, keepdims=True)
        rest = np.broadcast_to(scale / of_depth if of_depth is not scale else 1.0, dense.shape)
        sizes = np.abs(dense) if a["format"] in GROUPED else np.abs(factors) * np.abs(rest)
        rounded = (depth + 3) * np.finfo(np.float32).eps * largest_terms  # of what x is rounded to
        step = largest / 127 * (1 + 2.0**-14)  # three roundings of up to 127 steps are below 2**-14 of half a step
        bound = bound + step / 2 * (sizes + rounded).sum(1, keepdims=True)
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
