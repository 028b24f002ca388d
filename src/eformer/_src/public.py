"""Names of the public packages."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

_PRIVATE = __name__.rpartition(".")[0]


def name_publicly(package: dict[str, Any], below: str | None = None) -> None:
    """Give the classes and functions of a public package its name, which `help`, tracebacks and pickles then show.

    Results may be of classes that a package `below` offers. It is imported, so that these have their names, too.
    """
    if below is not None:
        importlib.import_module(below)
    for name, each in package.items():
        nameable = inspect.isclass(each) or inspect.isroutine(each)
        if nameable and each.__name__ == name and each.__module__.startswith(_PRIVATE):
            each.__module__ = package["__name__"]
