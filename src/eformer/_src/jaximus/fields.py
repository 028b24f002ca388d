"""How the class of an implicit array becomes a frozen dataclass by itself."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

STATIC = "static"  # metadata key of a dataclass field that is part of the tree's structure


# Typed as the value that the field will hold, which can be anything; so are those of `dataclasses.field`.
def aux_field(*, default: Any = dataclasses.MISSING, kw_only: bool = False, **kwargs: Any) -> Any:
    """A dataclass field that is static: hashable, part of the tree's structure, never traced."""
    metadata = {**kwargs.pop("metadata", {}), STATIC: True}
    return dataclasses.field(default=default, kw_only=kw_only, metadata=metadata, **kwargs)


class ArrayMeta(abc.ABCMeta):
    """Abstract methods, but no virtual subclasses: asking for those makes `isinstance` several times slower."""

    _data_fields: tuple[str, ...]
    _static_fields: tuple[str, ...]
    _mutable: bool

    __instancecheck__ = type.__instancecheck__
    __subclasscheck__ = type.__subclasscheck__

    def __setattr__(cls, name: str, value: object) -> None:
        """Let `@dataclass`, frozen or not, stand above a class that is one already, as every subclass is.

        The decorator sets its description, which the class has already. It also wants all bases to be frozen, or none;
        a class that it declares not to be frozen can have attributes set.
        """
        if name == "__dataclass_params__":
            for base in cls.__mro__:
                if isinstance(base, ArrayMeta):
                    type.__setattr__(base, name, value)
            if "_static_fields" in vars(cls):
                type.__setattr__(cls, "_mutable", not getattr(value, "frozen", True))
        elif name not in ("__dataclass_fields__", "__hash__") or "_static_fields" not in vars(cls):
            super().__setattr__(name, value)

    def __repr__(cls) -> str:
        # JAX's functions refuse an array by naming its type: that is where people learn what would work.
        return (
            f"<class '{cls.__module__}.{cls.__qualname__}', an implicit array: `eformer.jaximus.implicit(f)` takes it>"
        )


def make_dataclass(cls: ArrayMeta, finish: Callable[[Any, Sequence[int] | None], None]) -> None:
    """Make `cls` a frozen dataclass; its constructor, unless it is its own, also takes `shape` and calls `finish`."""
    own_init = "__init__" in vars(cls)
    dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    del cls.__setattr__, cls.__delattr__  # the base's are enough
    for name in ("__eq__", "__repr__"):  # a second `@dataclass` leaves them alone where they are defined
        setattr(cls, name, getattr(cls, name))
    if not own_init:
        setattr(cls, "__init__", _accepting_shape(getattr(cls, "__init__"), finish))  # noqa: B009, B010  (pyright)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]  # the decorator above made it one
    cls._data_fields = tuple(f.name for f in fields if not f.metadata.get(STATIC))
    cls._static_fields = tuple(f.name for f in fields if f.metadata.get(STATIC))


def _accepting_shape(
    init: Callable[..., None], finish: Callable[[Any, Sequence[int] | None], None]
) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: object, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        finish(self, shape)

    signature = inspect.signature(init)
    parameters = list(signature.parameters.values())
    given = inspect.Parameter("shape", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Sequence[int] | None")
    parameters.insert(-1, given)  # before `dtype`
    setattr(__init__, "__signature__", signature.replace(parameters=parameters))  # noqa: B010  (pyright: unknown)
    return __init__


def check_hashable(array: object, name: str) -> None:
    value = getattr(array, name)
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"`{type(array).__name__}.{name}` is static and must be hashable, got {type(value).__name__} {value!r}; "
            f"a tuple would work, or a plain field if it holds arrays"
        ) from None


def set_attribute(self: object, name: str, value: object) -> None:
    _check_mutable(self, f"`dataclasses.replace(array, {name}=...)` makes another")
    object.__setattr__(self, name, value)


def delete_attribute(self: object, name: str) -> None:
    _check_mutable(self, f"`{name}` can't be deleted")
    object.__delattr__(self, name)


def _check_mutable(array: object, advice: str) -> None:
    cls = type(array)
    if not (isinstance(cls, ArrayMeta) and cls._mutable):
        raise dataclasses.FrozenInstanceError(f"{cls.__name__} is a value: {advice}")
