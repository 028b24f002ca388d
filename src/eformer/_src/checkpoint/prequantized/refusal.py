"""The one place that decides whether a checkpoint is quantized in a way that is not read here.

Every opening of safetensors asks `check_said`, `check_methods` and `check_tensors`. They raise

1. where a configuration names a method that `METHODS` does not have, or has as not read;
2. where a module has the tensors of a method that is not read, or not all of them were read;
3. where a tensor may be the codes of a method that nobody knows: integers or FP8 beside scales, and the like.

So a new loader or layout can't go around it: what no layout reads, and nothing explains, is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping

import ml_dtypes
import numpy as np

from eformer._src.checkpoint.arrays import Entry
from eformer._src.checkpoint.file import CheckpointError
from eformer._src.checkpoint.header import Tensor

from .methods import METHODS, Method
from .quantization_config import KEYS, ConfigEntry, Configuration, entries_of


def _plain(text: object) -> str:
    return str(text).lower().replace("_", "-")


BY_NAME = {_plain(name): method for method in METHODS for name in method.says}
RAW = "`raw=True` loads the tensors as they are, `eformer inspect --raw` lists them"
FLOAT8 = tuple(
    np.dtype(getattr(ml_dtypes, f"float8_{kind}")) for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
)
E8M0 = FLOAT8[-1]
# Names of tensors that give codes their meaning: scales, zeros, tables, and orders of columns.
MEANING = re.compile(
    r"scale|zero|absmax|amax|codebook|centroid|lut|lookup|table|quant|hadamard|nbits|num_bits|group_size|perm|outlier"
    r"|biases|(^|[._])(q_\w+|s|z|su|sv|suh|svh|scb|minmax|tables2?)$",
    re.IGNORECASE,
)
# Names of integers that every model may have: positions, counts, ids of tokens, masks.
INDICES = re.compile(
    r"(^|_)(ids?|idxs?|index|indexes|indices|positions?|buckets|mask|lengths?|counts?|counter|steps?|epoch|seed|shape|sizes?"
    r"|tracked|tokens?|labels?|targets?|offsets?|bins?|bias|rngs?|keys?)$|^(step|age|t)\d*$",
    re.IGNORECASE,
)
# Names of tensors that say how activations are rounded, beside weights that stand for themselves.
ACTIVATIONS = re.compile(
    r"(^|_)(in|input|out|output|act|acts|activation|activations|q|k|v|kv|qk|prob|softmax|cache|logits?)(_|$)",
    re.IGNORECASE,
)
FEW = 256  # bytes of a vector that may be flags
WEIGHTS = re.compile(r"(^|_)(weights?|kernel|qweight|q?data|packed|codes|embedding|w)$", re.IGNORECASE)
MAX_PARTS = 6  # of a name, from its end, that may be what is beside another one
BY_TENSORS = [(method, ends) for method in METHODS for ends in method.tensors]
METADATA_KEYS = (*KEYS, "_quantization_metadata")  # of the header of a file


def check_said(config: Configuration, metadata: Mapping[str, object], file: str) -> None:
    """Raise a CheckpointError if what is said beside a file, or in its header, names a method that is not read."""
    for said in (*config.said, *_in_metadata(metadata)):
        _check_said(said, file)


def check_methods(
    names: Iterable[str], tensors: Mapping[str, Tensor], own: Container[str], *, before_layouts: bool
) -> None:
    """Raise a CheckpointError if a module has the tensors of a method; `names` has one of them.

    `own` are tensors that the file says were saved as arrays. Before layouts are tried, methods count that none reads.
    """
    for name in names:
        if not FIRST_ENDS.search(f".{name}") or name in own:
            continue
        for method, ends in BY_TENSORS:
            prefix = f".{name}".removesuffix(ends[0])
            parts = [(prefix + end)[1:] for end in ends]
            if not f".{name}".endswith(ends[0]) or not all(part in tensors for part in parts):
                continue
            floats = not any(_is_narrow(tensors[part]) for part in parts)  # which some write codes as
            common = floats and len(ends) > 1 and ends[0] != ".W_q"
            if not common and not (before_layouts and method.reads):
                shown = ", ".join(repr(part[-60:]) for part in parts)
                what = f"its tensors are those of {method.name} ({shown})"
                raise tensors[name].file.wrong(f"{what}. {_not_read(method)}", prefix[1:] or name)


def check_tensors(
    tensors: Mapping[str, Tensor], dense: Collection[str], own: Container[str], read: Mapping[str, Entry]
) -> None:
    """Raise a CheckpointError if tensors are, or may be, codes of a method that is not read.

    `dense` are the `tensors` that no layout took, and `own` those of them that the file says were saved as arrays.
    `read` are the arrays of the layouts.
    """
    left = {name: tensors[name] for name in dense if name not in own}
    _check_parts(left, read)
    beside = Neighbours(tensors)
    for name, tensor in left.items():
        why = _unexplained(name, tensor, beside)
        if why:
            raise tensor.file.wrong(
                f"it is {tensor.dtype.name}{list(tensor.shape)}{why}: most likely codes of a quantization that is not "
                f"read here. {RAW}",
                name,
            )


# --- configurations ---


def _in_metadata(metadata: Mapping[str, object]) -> Iterator[ConfigEntry]:
    for key in METADATA_KEYS:
        what = metadata.get(key)
        if not isinstance(what, str) or not what:
            continue
        try:
            parsed = json.loads(what)
        except (ValueError, RecursionError):
            parsed = what
        if parsed:
            yield ConfigEntry("the header", key, parsed)


def _check_said(said: ConfigEntry, file: str) -> None:
    given = name_of(said)
    if given is None:
        return
    place = f"{said.file} says" + ("" if said.key is None else f" by `{said.key}`")
    method = given if isinstance(given, Method) else BY_NAME.get(_plain(given))
    if method is None:
        unnamed = f"and names no method: {str(said.what)[:50]}"
        what = f"by {str(given)[:50]!r}, a method that is unknown here" if given else unnamed
        raise CheckpointError(f"{place} that it is quantized {what}. {RAW}", file=file)
    if not method.reads:
        raise CheckpointError(f"{place} that it is quantized by {method.name}. {_not_read(method)}", file=file)
    for key, value in entries_of(said.what):
        allowed, text = method.only.get(key), _plain(value)
        if key in method.never and value and not (isinstance(value, dict) and not any(value.values())):
            what = f"`{key}`, for {method.name}: {method.never[key]}"
            raise CheckpointError(f"{place} {what}. {_not_read(method)}", file=file)
        if allowed is not None and isinstance(value, str) and value and text not in map(_plain, allowed):
            what = f"`{key}` {value[:50]!r}, which is not read for {method.name}: it reads {method.reads}"
            raise CheckpointError(f"{place} {what}. What works: {method.instead}. {RAW}", file=file)


def name_of(said: ConfigEntry) -> Method | str | None:
    """The method that is named, or the one that has such entries; "" if it is none of any, None if nothing is said."""
    what = said.what
    if isinstance(what, dict) and not any(what.values()):
        return None
    if not isinstance(what, dict):
        return what if isinstance(what, str) else ""
    for key in ("quant_method", "quantization_method", "method"):
        if isinstance(value := what.get(key), str) and value:
            return value
    if said.file == "quanto_qmap.json":
        return "quanto"
    found = next((method for method in METHODS if what.keys() & set(method.keys)), None)
    if found is None and (said.key is None or any(isinstance(each, dict) and "bits" in each for each in what.values())):
        return None  # a file of another purpose, or MLX with entries for modules alone
    return found or ""


def _not_read(method: Method) -> str:
    return f"It is not read here; what works: {method.instead}. {RAW}"


# --- tensors ---

FIRST_ENDS = re.compile(f"({'|'.join(sorted({re.escape(ends[0]) for _, ends in BY_TENSORS}))})$")


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype.kind in "iu" or tensor.dtype in FLOAT8


def _check_parts(left: Mapping[str, Tensor], read: Mapping[str, Entry]) -> None:
    """Raise if an array of a layout has one more scale, table or order, which the layout does not know."""
    arrays = {part.name.rpartition(".")[0]: entry for entry in read.values() for part in entry.tensors}
    for name, tensor in left.items():
        module, _, last = name.rpartition(".")
        if module in arrays and MEANING.search(last) and not ACTIVATIONS.search(last):
            entry = arrays[module]
            what = f"it is beside {entry.name[-60:]!r}, of the layout {entry.format}, and no part of that"
            raise tensor.file.wrong(f"{what}: this is another layout, which is not read. {RAW}", name)


class Neighbours:
    """For each tensor, others of its module, or of its own name and more: found once, as files may have many."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.of_module: dict[str, list[str]] = {}  # tensors that give codes their meaning, by their module
        self.of_name: dict[str, str] = {}  # and by the beginnings of its name
        self.floats: dict[str, str] = {}
        for name, tensor in tensors.items():
            module, _, last = name.rpartition(".")
            if tensor.dtype.kind == "f" or tensor.dtype.name == "bfloat16":
                self.floats.setdefault(module, name)
            if MEANING.search(last):
                self.of_module.setdefault(module, []).append(name)
                beginnings = [name[: found.start()] for found in re.finditer(r"[._]", name)]
                self.of_name |= dict.fromkeys(beginnings[-MAX_PARTS:], name)


def _unexplained(name: str, tensor: Tensor, beside: Neighbours) -> str | None:
    """Why a tensor may be codes; None if it is an array as any other."""
    module, _, last = name.rpartition(".")
    integer, wide = tensor.dtype.kind in "iu", tensor.dtype.itemsize == 8
    if tensor.dtype == E8M0:
        return ", powers of two that scale something"
    if not _is_narrow(tensor) or math.prod(tensor.shape) < 2:
        return None
    weight = WEIGHTS.search(last)
    if name in beside.of_name and not wide:
        return f" beside {beside.of_name[name][-60:]!r}"
    if integer and not weight and INDICES.search(last):
        return None
    meanings = beside.of_module.get(module, []) if module or weight else []
    other = next((each for each in meanings[:2] if each != name), None)
    if other is not None and not wide:
        return f" beside {other[-60:]!r}"
    is_matrix = len(tensor.shape) > 1 or (tensor.dtype.itemsize == 1 and tensor.nbytes >= FEW)
    if not integer or not is_matrix:
        return None
    if weight and (module or last.lower() in ("weight", "kernel", "qweight")):
        return ", a matrix of integers in the place of a weight"
    if module in beside.floats and module and not wide:
        return f", a matrix of integers beside {beside.floats[module][-60:]!r}"
    return None
