"""The command `eformer`, which answers Ctrl-C at once, also while JAX is imported."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from ._interrupt import INTERRUPTED, LINE, deferred, ending_at_once, leave, remembered, undone_by, watched


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process, and return its exit code.

    0 is done, 1 failed, 2 wrong usage, 130 interrupted. Answers go to standard output, all else to standard error.
    """
    if argv is None:
        return _of_the_process()
    try:
        with deferred():
            from ._run import run
        with remembered():
            return run(argv)
    except KeyboardInterrupt:
        print(f"eformer: {LINE}", file=sys.stderr, flush=True)
        return INTERRUPTED


def _of_the_process() -> int:
    """The same where the process is ours to end."""
    try:
        with ending_at_once():
            from eformer.checkpoint import abandon_saves

            from ._run import run
        with undone_by(abandon_saves), watched():
            code = run(None)
            if code == INTERRUPTED:
                leave(said=True)
    except KeyboardInterrupt:
        leave()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback out of the end of the interpreter
    return code
