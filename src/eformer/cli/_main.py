"""The command `eformer`, which hears Ctrl-C also while JAX is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ._interrupt import deferred, remembered


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process, and return its exit code.

    0 is done, 1 failed (also when interrupted), 2 wrong usage. Answers go to standard output, all else to standard
    error.
    """
    try:
        with deferred():
            from ._run import run
        with remembered():
            return run(argv)
    except KeyboardInterrupt:
        print("eformer: interrupted; nothing is left half-written", file=sys.stderr, flush=True)
        return 1
