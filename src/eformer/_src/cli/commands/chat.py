"""`eformer chat`: a conversation with a language model."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eformer._src.atomic_files import write_file
from eformer._src.cli.answer import Answer

from . import language_model

EXAMPLE = (
    """\
examples:
  eformer chat smollm2
  eformer chat ./folder --system "You answer in one sentence." --temperature 0.7 --top-p 0.9
  eformer chat model.gguf --adapter ./adapter --repetition-penalty 1.1 --stop "User:"

Lines are what you say. Lines that begin with / are commands:
  /reset          begin again
  /system TEXT    begin again, and tell the model its role
  /save FILE      write the conversation as JSON
  /exit           leave; so does the end of input
Ctrl-C ends an answer; while you type, it leaves.
"""
    + language_model.MODELS
)
COMMANDS = {"/reset": False, "/system": True, "/save": True, "/exit": False, "/help": False}  # whether they take words


class Conversation:
    """Messages and the model that answers; the oldest ones are forgotten when there is no more room."""

    def __init__(self, model: Any, system: str | None) -> None:
        self._model = model
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def prompt(self, text: str) -> int:
        """Add what the user says; the result is how many messages had to be forgotten."""
        first, before = len(self.messages) > 0 and self.messages[0]["role"] == "system", len(self.messages)
        self.messages.append({"role": "user", "content": text})
        room = self._model.engine.longest * 3 // 4  # an answer needs some, too
        while len(self.messages) > first + 1 and len(self._model.encode(self.messages)) > room:
            del self.messages[first : first + 2]
        return before + 1 - len(self.messages)

    def answer(self, **options: Any) -> Iterator[str]:
        return self._model.stream(self.messages, **options)


def configure(parser: argparse.ArgumentParser) -> None:
    language_model.configure(parser)
    language_model.configure_answers(parser)


def run(args: argparse.Namespace) -> Answer:
    options = language_model.options(args)
    model = language_model.load(args)
    talk, show = Conversation(model, args.system), not args.json
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # `input` then edits lines
        print("/help lists the commands", file=sys.stderr, flush=True)
    for line in _lines():
        try:
            if line.startswith("/"):
                said = _command(talk, line)
                if said is None:
                    break
                print(said, file=sys.stderr, flush=True)
                continue
            if forgotten := talk.prompt(line):
                print(f"[forgot {forgotten} messages: no room for more, see --context]", file=sys.stderr, flush=True)
            answer = language_model.shown(talk.answer(**options), show=show)
            talk.messages.append({"role": "assistant", "content": answer})
            if not args.quiet:
                print(language_model.times(model.last, args.max_tokens), file=sys.stderr, flush=True)
        except (ValueError, OSError) as error:  # the conversation goes on
            if talk.messages and talk.messages[-1]["role"] == "user":
                talk.messages.pop()
            print(f"eformer chat: {error}", file=sys.stderr, flush=True)
    return Answer([], {"messages": talk.messages})


def _lines() -> Iterator[str]:
    """What the user types, without empty lines."""
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line


def _command(talk: Conversation, line: str) -> str | None:
    """Do what a line that begins with / says; the result is what to tell, or None to leave."""
    name, _, words = line.partition(" ")
    words = words.strip()
    if name not in COMMANDS or COMMANDS[name] != bool(words):
        wanted = ", ".join(f"{each} {'...' * takes}".strip() for each, takes in COMMANDS.items())
        raise ValueError(f"{line!r} is no command; there are {wanted}")
    if name == "/save":
        path = Path(words).expanduser()
        if path.exists():
            raise ValueError(f"{path} exists; give another name")
        write_file(path, json.dumps(talk.messages, indent=1, ensure_ascii=False).encode(), overwrite=False)
        return f"wrote {path}: {len(talk.messages)} messages"
    if name in ("/reset", "/system"):
        talk.reset(words or talk.system)
        return "a new conversation"
    return None if name == "/exit" else EXAMPLE.partition("\n\n")[2].partition("\nMODEL is")[0]
