"""The command `eformer`, which answers Ctrl-C at once, also while JAX is imported."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from .interrupt import INTERRUPTED, LINE, deferred, handled_by, leave, raise_interrupt, undone_by, watched


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process, and return its exit code.

    The code is 0 for done, 1 for failed, 2 for wrong usage, 130 for interrupted. Answers go to standard output,
    everything else to standard error.
    """
    if argv is None:
        return _main_of_process()
    try:
        with deferred():
            from .run import prepared

            run = prepared(argv)
        with handled_by(raise_interrupt):
            return run()
    except KeyboardInterrupt:
        print(f"eformer: {LINE}", file=sys.stderr, flush=True)
        return INTERRUPTED


def _main_of_process() -> int:
    """`main` where an interrupt may end the whole process."""
    try:
        with handled_by(lambda *_: leave()):  # at once: importing writes no files
            from eformer._src.atomic_files import abandon_saves

            from .run import prepared

            run = prepared(None)
        with undone_by(abandon_saves), watched():
            code = run()
            if code == INTERRUPTED:
                leave(printed=True)
    except KeyboardInterrupt:
        leave()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the interpreter ends
    return code
