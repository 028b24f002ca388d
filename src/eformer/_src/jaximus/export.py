"""`jax.export`: the static part of an implicit array is written into a serialized program as JSON."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import export

Json: TypeAlias = Any  # numbers, strings, lists and dictionaries of them


def make_serializable(cls: type, record: type) -> None:
    """Let programs that take or return arrays of this class be serialized, under the name of the class.

    The static part of the tree is a pair: the values of the static fields, and a `record`, which is a named tuple.
    """
    # Programs outlive the files that classes are in: a class of `eformer._src` goes by the name of the package above.
    name = f"{cls.__module__.partition('._src')[0]}.{cls.__qualname__}"

    def deserialize(data: bytes | bytearray) -> tuple[object, object]:
        fields, kept = _restored(json.loads(data))
        return fields, record(*kept)

    try:
        export.register_pytree_node_serialization(
            cls, serialized_name=name, serialize_auxdata=_serialize, deserialize_auxdata=deserialize
        )
    except ValueError:  # a class of that name was defined before (a cell that runs again): the name stays the first's
        return


def _serialize(static: object) -> bytes:
    return json.dumps(_described(static)).encode()


def _described(value: object) -> Json:
    """As JSON: plain values as they are, tuples and dtypes as a mapping from the name of their kind."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return {"tuple": [_described(each) for each in value]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    raise TypeError(
        f"a program that takes this array can't be serialized: the static value {value!r} is no number, str, dtype or "
        f"tuple of them; give the program the leaves of the array instead (`jax.tree.leaves`)"
    )


def _restored(value: Json) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, given),) = value.items()
    return tuple(map(_restored, given)) if kind == "tuple" else jnp.dtype(given)
