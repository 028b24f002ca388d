"""Warnings that point at the line of the user who can do something about them."""

from __future__ import annotations

import sys
import warnings

_NOT_USERS = frozenset({"eformer", "jax", "jaxlib", "contextlib", "functools"})  # packages that warnings pass through


def warn(message: str, category: type[Warning]) -> None:
    """`warnings.warn` for the nearest caller outside this package and JAX."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
