"""The seal: what stands in place of a folder's config.json while a save replaces the files beside it.

Weights and the files that say how to read them can't take their names in one step. So the configuration goes first and
comes last: in between there is a seal, which holds the text that was there before. Our readers look through it; other
programs find no configuration of a model in it and stop, rather than read new weights by the old text.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import NamedTuple

BEGINNING = b'{"eformer_save": '
WHAT = "a save is replacing the files of this folder; if none is running, it was interrupted: save here again"


class Seal(NamedTuple):
    token: str  # of the save
    before: bytes | None  # what the file held; None if there was none


def sealed(token: str, before: bytes | None) -> bytes:
    """The text of a seal."""
    text = None if before is None else before.decode("utf-8", "surrogateescape")
    return BEGINNING + json.dumps({"token": token, "what": WHAT, "before": text}).encode() + b"}"


def parse_seal(text: bytes) -> Seal | None:
    """The seal that a text is; None for any other text."""
    if not text.startswith(BEGINNING):
        return None
    try:
        found = json.loads(text)["eformer_save"]
        token, before = found["token"], found["before"]
        return Seal(str(token), None if before is None else before.encode("utf-8", "surrogateescape"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def unsealed(text: bytes) -> bytes | None:
    """The text that a seal stands for, None if there was none; any other text as it is."""
    found = parse_seal(text)
    return text if found is None else found.before


def is_sealed(path: Path) -> bool:
    """Whether a save has put a seal in place of a file."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with open(path, "rb") as file:
            return file.read(len(BEGINNING)) == BEGINNING
    except OSError:
        return False


def read_if_plain(path: Path) -> bytes | None:
    """The bytes of a plain file; None if there is none."""
    try:
        return path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else None
    except FileNotFoundError:
        return None
