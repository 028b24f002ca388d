"""Runs one command and prints its answer, or one line that says what is wrong."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import eformer
from eformer._src.text import printable

from .interrupt import INTERRUPTED, LINE

OK, FAILED, WRONG_USAGE = 0, 1, 2
COMMANDS = {  # with the help of each; a command is imported when it is asked for
    "quantize": "write a checkpoint again with its weights in fewer bits",
    "calibrate": "run a language model on a text, and keep what its weights are multiplied by",
    "inspect": "list the arrays of a checkpoint; reads no data",
    "compare": "show the error of each array of a checkpoint against another",
    "convert": "write a checkpoint as safetensors, bitsandbytes, compressed-tensors, MLX or GGUF",
    "lora": "add an adapter of LoRA into the weights of a model",
    "run": "let a language model answer a prompt",
    "chat": "talk with a language model",
    "serve": "serve a language model to clients of OpenAI's interface, and a page to chat on",
    "bench": "time matmuls with quantized weights against float32",
    "demo": "run a language model and a sentence encoder in each format, and show size, quality and speed",
    "completion": "print a script that completes words of this command in bash, zsh or fish",
}
FILES = {"run": "write"}  # in `commands`, of commands that have another name than their file
EPILOG = "`eformer COMMAND --help` has examples. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."


def command_module(name: str) -> Any:
    """The file of a command: its `EXAMPLE`, `configure(parser)` and `run(args)`, and perhaps `more_help()`."""
    return importlib.import_module(f"{__package__}.commands.{FILES.get(name, name)}")


def expected() -> tuple[type[Exception], ...]:
    """What the library raises for files, formats and machines that do not serve; all else is a bug, shown whole."""
    import jax

    from eformer._src.model.rules import UnusedRuleWarning

    files = (OSError, ValueError, TypeError, NotImplementedError, ImportError, MemoryError)
    return (*files, UnusedRuleWarning, jax.errors.JaxRuntimeError)


class _UsageError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{self.prog}: {message}; `{self.prog} --help` shows how")


def prepared(argv: Sequence[str] | None) -> Callable[[], int]:
    """What runs the command line `argv`, None for that of the process, and returns the exit code; it imports first."""
    words = sys.argv[1:] if argv is None else argv
    try:
        args = make_parser(words[:1]).parse_args(words)
    except _UsageError as error:
        return functools.partial(_fail, str(error), WRONG_USAGE)
    importlib.import_module("eformer.checkpoint")  # files may hold arrays of the documented classes too
    return functools.partial(_run, args)


def _run(args: argparse.Namespace) -> int:
    try:
        answer = command_module(args.command).run(args)
        if args.json or answer.lines:  # what `run` and `chat` wrote is printed already
            print(answer.to_json() if args.json else answer.text, flush=True)
    except KeyboardInterrupt:
        return _fail(f"eformer {args.command}: {LINE}", INTERRUPTED)
    except BrokenPipeError:  # the reader has seen enough, as in `eformer inspect FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except expected() as error:
        if args.traceback:
            raise
        return _fail(f"eformer {args.command}: {_in_one_line(error, args)}", FAILED)
    return OK


def make_parser(configured: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser of command lines, with all commands and with the arguments of the `configured` ones."""
    parser = _Parser(prog="eformer", description=(eformer.__doc__ or "").partition("\n")[0], epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"eformer {eformer.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, help in COMMANDS.items():
        if name not in configured:
            commands.add_parser(name, help=help)
            continue
        module = command_module(name)
        command = commands.add_parser(
            name,
            help=help,
            description=help,
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
