"""Where a command writes: it replaces files only if told to, and leaves nothing behind if it fails."""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from eformer._src.atomic_files import make_folder, unmake_folders
from eformer._src.checkpoint.paths import SUFFIXES
from eformer._src.model.report.report import Report

from .interrupt import undone_by

PAGES = (".html", ".htm")
DOCTYPE = b"<!doctype html>"
SHOWN = 10  # names in one line


def check_free(path: Path, *, force: bool) -> None:
    """Raise a FileExistsError unless `path` is free, an empty folder, or may be replaced."""
    taken = os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))
    if taken and not force:
        raise FileExistsError(f"{path} exists; --force replaces it")


def said(replaced: Sequence[str]) -> str:
    """A line that names the replaced files; empty if there are none."""
    more = f" and {len(replaced) - SHOWN} more" if len(replaced) > SHOWN else ""
    return f"\nreplaced: {', '.join(replaced[:SHOWN])}{more}" if replaced else ""


@contextlib.contextmanager
def writing_to(path: Path, *, force: bool) -> Iterator[list[str]]:
    """Claim `path` by making its folder: a second command that wants the same folder is refused.

    If the block raises, the folder is removed again, unless there is something in it. The list that is yielded holds,
    after the block, the files there that are gone or changed.
    """
    check_free(path, force=force)
    before, replaced = _files_at(path), list[str]()
    with contextlib.ExitStack() as stack:
        if path.suffix not in SUFFIXES and not os.path.lexists(path):
            made = make_folder(path)
            if path not in made and not force:
                raise FileExistsError(f"{path} exists; --force replaces it")
            stack.callback(unmake_folders, made)  # a folder with a checkpoint in it stays
            stack.enter_context(undone_by(lambda: unmake_folders(made)))
        yield replaced
    now = _files_at(path)
    replaced += [str(each) for each, found in before.items() if now.get(each) != found]


def _files_at(path: Path) -> dict[Path, tuple[int, ...]]:
    """The files in a folder, or beside a file with names that begin alike, with numbers that tell when one changes."""
    folder, beginning = (path.parent, path.stem) if path.suffix in SUFFIXES else (path, "")
    files = {}
    for each in sorted(folder.glob(f"{glob.escape(beginning)}*")):
        with contextlib.suppress(FileNotFoundError):  # another command may remove it
            stats = each.lstat()
            if (stat.S_ISREG(stats.st_mode) or stat.S_ISLNK(stats.st_mode)) and not each.name.startswith("."):
                files[each] = (stats.st_ino, stats.st_size, stats.st_mtime_ns)
    return files


def page_path(text: str) -> Path:
    """A path that ends in .html, so that a page replaces no other kind of file."""
    path = Path(text)
    if path.suffix.lower() not in PAGES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(PAGES)}: the report is a page")
    return path


def check_page(path: Path | None, *, force: bool) -> None:
    """Raise an error unless `path` is None, free, or holds a page that may be replaced."""
    if path is None or not os.path.lexists(path):
        return
    check_free(path, force=force)
    if not path.is_file():
        raise FileExistsError(f"{path} is no file; write the report to another place")
    with open(path, "rb") as file:
        if file.read(len(DOCTYPE)).lower() != DOCTYPE:
            raise FileExistsError(f"{path} exists and is no page; write the report to another place, or remove it")


def write_page(report: Report, path: Path, *, title: str, force: bool) -> Path:
    """Write the report as a page, whole or not at all."""
    check_page(path, force=force)
    return report.to_html(path, title=title, overwrite=force)
