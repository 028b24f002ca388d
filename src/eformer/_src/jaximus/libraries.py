"""What other libraries do with arrays that is not JAX: Flax writes bytes, and some make an array dense unasked."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, TypeAlias

from eformer._src.user_warnings import warn

from .instrumentation import MaterializationWarning

State: TypeAlias = dict[str, Any]  # of the leaves by their names, and `_ABOUT`
_ABOUT = "static"  # what the leaves mean, as text
_LIBRARIES = frozenset({"flax", "keras", "equinox", "haiku"})
_warned: set[tuple[type, str]] = set()


def know_to_flax(cls: Any) -> None:
    """Let `flax.serialization` write arrays of this class, if it was imported; it has a registry of types."""
    flax = sys.modules.get("flax.serialization")
    if flax is None or "_known_to_flax" in vars(cls):
        return
    type.__setattr__(cls, "_known_to_flax", True)
    to_state, from_state = flax.to_state_dict, flax.from_state_dict

    def state(array: Any) -> State:
        leaves = {name: getattr(array, name) for name in cls._data_fields}
        return {_ABOUT: _about(array), **{n: to_state(leaf) for n, leaf in leaves.items() if leaf is not None}}

    def restored(array: Any, state: State) -> Any:
        names = {name for name in cls._data_fields if getattr(array, name) is not None}
        if state.keys() != {_ABOUT, *names} or state[_ABOUT] != _about(array):
            raise ValueError(
                f"the state is not that of this {array!r}: it has {', '.join(sorted(state))}, with "
                f"{state.get(_ABOUT)}, and the array has {', '.join(sorted(names))}, with {_about(array)}"
            )
        made = object.__new__(cls)
        leaves = {name: from_state(getattr(array, name), state[name]) for name in names}
        vars(made).update({**vars(array), **leaves})
        made._finish_construction(None if array._kept.given_shape is None else array.shape)
        return made

    flax.register_serialization_state(cls, state, restored, override=True)


def _about(array: Any) -> str:
    return ", ".join(f"{name}={getattr(array, name)}" for name in array._static_fields)


def note_conversion(array: Any, frame: FrameType | None) -> None:
    """Warn once if a library, and not the user, converts the array to a dense one by a function of JAX."""
    first = frame
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("jax.", "numpy.")):
        frame = frame.f_back
    library = "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]
    if frame is first or library not in _LIBRARIES or (type(array), library) in _warned:
        return
    _warned.add((type(array), library))
    warn(
        f"{library} makes a dense copy of {array!r}, {array.size * array.dtype.itemsize:,} bytes, as it runs outside "
        f"`implicit`; `implicit(f)`, around the function that calls {library}, keeps the array as it is",
        MaterializationWarning,
    )
