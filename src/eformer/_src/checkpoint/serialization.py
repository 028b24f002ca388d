"""Quantized arrays as JSON and tensors: the class, its static fields, and which tensor is which leaf.

A description is `{"class": ..., "static": {field: value}, "leaves": {field: tensor name, or a description}}`. Classes
are looked up among the registered ones, and nowhere else. `"codes"` is the class's `_code_version`, if that is not 1:
codes of an older version are read with the meaning they had then.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any  # for JAX's PyTreeDef, which is no type to checkers

import jax
import numpy as np
from jax import tree_util as jtu
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, jaxprs_in_params

from eformer._src.jaximus.array import ImplicitArray
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.registry import array_types, format_names, formats
from eformer._src.quantization.stored import array_from_fields, check_array, declares_leaves

from .file import CheckpointError
from .header import BY_NUMPY_NAME, Json, checked_shape

KEY = "eformer"  # of our part of the metadata
VERSION = 1
MAX_DEPTH = 4  # of quantized arrays in quantized arrays

# Bytes of an array that decoding may make per byte stored; a block longer than its row can ask for much more.
MAX_EXPANSION = 256
SMALL = 1 << 24

# Errors that the code of a format can raise on leaves that it did not make.
FORMAT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)


def format_name(q: QuantizedArray) -> str:
    """The name of the array's format, or else of its class."""
    return next(iter(format_names(q)), type(q).__name__)


def names_of(classes: Iterable[type]) -> str:
    """The names of the formats that make these classes, for an error message."""
    known = set(classes)
    return " or ".join(repr(form.name) for form in formats() if form.array_type in known)


def describe(name: str, q: ImplicitArray) -> tuple[dict[str, Json], list[str]]:
    """The description of an array called `name`, and the names of its tensors in the order of its leaves."""
    cls = type(q)
    if array_types().get(cls.__name__) is not cls:
        raise TypeError(f"{name!r} is a {cls.__name__}, which is not registered; `register_format` makes it known")
    static: dict[str, Json] = {}
    leaves: dict[str, Json] = {}
    tensors: list[str] = []
    for field in dataclasses.fields(q):
        value, tensor = getattr(q, field.name), f"{name}.{field.name}"
        if field.metadata.get("static"):
            static[field.name] = _encoded(value, name, field.name)
        elif isinstance(value, ImplicitArray):
            leaves[field.name], inner = describe(tensor, value)
            tensors += inner
        elif value is not None:
            leaves[field.name] = tensor
            tensors.append(tensor)
    version = array_types()[cls.__name__]._code_version
    codes: dict[str, Json] = {} if version == 1 else {"codes": version}
    return {"class": cls.__name__, **codes, "static": static, "leaves": leaves}, tensors


def rebuild(described: Json, leaf: Callable[[str], jax.ShapeDtypeStruct], depth: int = 0) -> tuple[QuantizedArray, int]:
    """The array of a description, with `leaf(tensor name)` for each leaf, and the version of its codes."""
    known = {"class", "codes", "static", "leaves"}
    if depth > MAX_DEPTH or not isinstance(described, dict) or not described.keys() <= known:
        raise CheckpointError("a quantized array is described by `class`, `codes`, `static` and `leaves`")
    kind, static, leaves = (described.get(key) for key in ("class", "static", "leaves"))
    cls = array_types().get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise CheckpointError(f"the class {str(kind)[:50]!r} is not one of {', '.join(array_types())}")
    version, newest = described.get("codes", 1), cls._code_version
    if type(version) is not int or not 1 <= version <= newest or (depth and version != newest):
        raise CheckpointError(f"its codes have version {str(version)[:20]}; this release reads {newest}")
    if not isinstance(static, dict) or not isinstance(leaves, dict):
        raise CheckpointError("`static` and `leaves` of a quantized array must be objects")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for given, what in ((static, "static field"), (leaves, "leaf")):
        for name in given:
            if name not in fields or bool(fields[name].metadata.get("static")) != (given is static):
                raise CheckpointError(f"{cls.__name__} has no {what} {name[:50]!r}")
    values: dict[str, object] = {name: _decoded(value) for name, value in static.items()}
    for name, value in leaves.items():
        values[name] = leaf(value) if isinstance(value, str) else rebuild(value, leaf, depth + 1)[0]
    try:
        made = array_from_fields(cls, values)
        shape = checked_shape(list(made.shape))
    except FORMAT_ERRORS as error:
        raise CheckpointError(f"that is no {cls.__name__}: {str(error)[:300]}") from None
    if shape is None:
        raise CheckpointError(f"a {cls.__name__} of shape {str(made.shape)[:100]} is absurd")
    _check_trial(made)
    return made, version


def _encoded(value: object, name: str, field: str) -> Json:
    if isinstance(value, np.dtype) and value.name in BY_NUMPY_NAME:
        return {"dtype": value.name}
    if isinstance(value, tuple):
        return [_encoded(each, name, field) for each in value]
    if isinstance(value, np.integer):
        return int(value)
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TypeError(f"{name!r} has the static field `{field}={value!r}`; a checkpoint holds numbers, text and dtypes")


def _decoded(value: Json) -> object:
    match value:
        case list():
            return tuple(map(_decoded, value))
        case {"dtype": str(name)} if len(value) == 1 and name in BY_NUMPY_NAME:
            return jax.dtypes.canonicalize_dtype(BY_NUMPY_NAME[name])
        case dict():
            raise CheckpointError(f"a static field holds {str(value)[:100]}, which is no dtype")
    return value


def check_decoding(q: QuantizedArray) -> None:
    """Raise a CheckpointError unless the leaves of `q` decode to its shape, in memory proportional to their size."""
    try:
        check_array(q)
    except FORMAT_ERRORS as error:
        raise CheckpointError(f"that is no {type(q).__name__}: {str(error)[:300]}") from None
    _check_trial(q)


def _check_trial(q: QuantizedArray) -> None:
    if not declares_leaves(type(q)):
        leaves, treedef = jtu.tree_flatten(q)
        _try_to_decode(treedef, tuple((np.shape(leaf), np.dtype(leaf.dtype)) for leaf in leaves))


@functools.lru_cache(maxsize=4096)
def _try_to_decode(treedef: Any, leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> None:
    given = [jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in leaves]
    q = jtu.tree_unflatten(treedef, given)
    try:
        traced = jax.make_jaxpr(lambda q: q.decode())(q)
        shape = q.shape
    except FORMAT_ERRORS as error:
        raise CheckpointError(f"its leaves do not decode as {type(q).__name__}: {str(error)[:300]}") from None
    if traced.out_avals[0].shape != shape:
        raise CheckpointError(f"its leaves decode to {traced.out_avals[0].shape}, and it says {shape}")
    stored = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in given)
    largest = max(_sizes(traced.jaxpr), default=0)
    if largest > MAX_EXPANSION * stored + SMALL:
        what = f"decoding {stored} bytes would take an array of {largest}: `{type(q).__name__}` is not meant so"
        raise CheckpointError(what)


def _sizes(jaxpr: Jaxpr) -> list[int]:
    """Bytes of every array that a program makes."""
    avals = [variable.aval for eqn in jaxpr.eqns for variable in eqn.outvars]
    own = [math.prod(aval.shape) * aval.dtype.itemsize for aval in avals if isinstance(aval, ShapedArray)]
    return own + [size for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params) for size in _sizes(inner)]
