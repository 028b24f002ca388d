"""Where a command writes: never over what is there unless told to, and nothing is left of what failed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from eformer.model import Report

from ._arguments import FILES


def check_free(path: Path, *, force: bool) -> None:
    """A FileExistsError unless `path` is free, an empty folder, or may be replaced."""
    taken = os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))
    if taken and not force:
        raise FileExistsError(f"{path} exists; --force replaces it")


@contextlib.contextmanager
def claimed(path: Path, *, force: bool) -> Iterator[Path]:
    """`path`, free to be written; a folder that is made for it is removed if the block raises.

    Making the folder claims it: of two commands that want the same one, the second is refused.
    """
    check_free(path, force=force)
    mine = path.suffix not in FILES and not os.path.lexists(path)
    if mine:
        path.mkdir(parents=True)
    try:
        yield path
    except BaseException:
        if mine:
            shutil.rmtree(path, ignore_errors=True)
        raise


def write_page(report: Report, path: Path, *, title: str, force: bool) -> Path:
    """The report as HTML, whole or not at all."""
    check_free(path, force=force)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        report.to_html(temporary, title=title)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
