"""Runs one command and prints its answer, or one line that says what is wrong."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

import eformer
from eformer._src.model.rules import UnusedRuleWarning
from eformer._src.text import printable

from .commands import bench as _bench
from .commands import calibrate as _calibrate
from .commands import chat as _chat
from .commands import compare as _compare
from .commands import completion as _completion
from .commands import convert as _convert
from .commands import demo as _demo
from .commands import inspect as _inspect
from .commands import lora as _lora
from .commands import quantize as _quantize
from .commands import serve as _serve
from .commands import write as _write
from .interrupt import INTERRUPTED, LINE

OK, FAILED, WRONG_USAGE = 0, 1, 2
COMMANDS = {
    "quantize": _quantize,
    "calibrate": _calibrate,
    "inspect": _inspect,
    "compare": _compare,
    "convert": _convert,
    "lora": _lora,
    "run": _write,
    "chat": _chat,
    "serve": _serve,
    "bench": _bench,
    "demo": _demo,
    "completion": _completion,
}
EPILOG = "`eformer COMMAND --help` has examples. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."

# The library raises these for files, formats and machines that do not serve; anything else is a bug, shown whole.
EXPECTED = (
    OSError,
    ValueError,
    TypeError,
    NotImplementedError,
    ImportError,
    MemoryError,
    UnusedRuleWarning,
    jax.errors.JaxRuntimeError,
)


class _UsageError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{self.prog}: {message}; `{self.prog} --help` shows how")


def run(argv: Sequence[str] | None) -> int:
    """Run the command line `argv`, None for that of the process, and return the exit code."""
    try:
        args = make_parser().parse_args(argv)
    except _UsageError as error:
        return _fail(str(error), WRONG_USAGE)
    try:
        answer = COMMANDS[args.command].run(args)
        if args.json or answer.lines:  # what `run` and `chat` wrote is printed already
            print(answer.to_json() if args.json else answer.text, flush=True)
    except KeyboardInterrupt:
        return _fail(f"eformer {args.command}: {LINE}", INTERRUPTED)
    except BrokenPipeError:  # the reader has seen enough, as in `eformer inspect FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except EXPECTED as error:
        if args.traceback:
            raise
        return _fail(f"eformer {args.command}: {_in_one_line(error, args)}", FAILED)
    return OK


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="eformer", description=(eformer.__doc__ or "").partition("\n")[0], epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"eformer {eformer.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=module.EXAMPLE + getattr(module, "more_help", str)(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(command)
        command.add_argument("--json", action="store_true", help="answer in JSON")
        command.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
    return parser


def _fail(line: str, code: int) -> int:
    print(printable(line), file=sys.stderr, flush=True)
    return code


def _in_one_line(error: BaseException, args: argparse.Namespace) -> str:
    inputs = [getattr(args, name, None) for name in ("source", "before", "after")]
    if isinstance(error, FileNotFoundError) and str(error.filename) in inputs:
        more = (error.strerror or "").partition("; ")[2]
        instead = more or "give a .safetensors or .gguf file, an index or a folder with one"
        return f"there is no {str(error.filename)!r}; {instead}"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return " ".join(str(error).split()) or type(error).__name__
