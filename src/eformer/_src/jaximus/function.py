"""What must be a function, and is often its result, or what it is to be called with."""

from __future__ import annotations


def check_function(function: object, name: str) -> None:
    """A TypeError unless `function` can be called, which `name` is to wrap."""
    if not callable(function):
        raise TypeError(
            f"`{name}` takes a function, got {type(function).__name__}: write `{name}(f)(x)`, where `{name}(f)` is a "
            f"function like `f`, and `x` what it is called with"
        )


def check_function_first(function: object, call: str) -> None:
    """A TypeError unless `function`, the first argument of `call`, can be called."""
    if not callable(function):
        raise TypeError(f"`{call}` takes a function first, got {type(function).__name__}")
