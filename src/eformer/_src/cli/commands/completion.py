"""`eformer completion`: a script that lets a shell complete commands, options, formats and files."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eformer._src.cli.answer import Answer
from eformer._src.cli.arguments import KEEP, byte_count, format_names, format_rule, positive, problem, rule

EXAMPLE = """\
examples:
  eformer completion bash > ~/.local/share/bash-completion/completions/eformer
  eformer completion zsh > "${fpath[1]}/_eformer"
  eformer completion fish > ~/.config/fish/completions/eformer.fish
"""


class Option(NamedTuple):
    flag: str
    help: str
    takes_value: bool
    words: Sequence[str] | None  # to complete its value with; None for files


class Command(NamedTuple):
    name: str
    help: str
    options: Sequence[Option]
    words: Sequence[str] | None  # to complete arguments without a flag with; None for files


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(SCRIPTS), help="the shell that reads the script")


def run(args: argparse.Namespace) -> Answer:
    from eformer._src.cli.run import make_parser  # which knows this command too

    script = SCRIPTS[args.shell](commands_of(make_parser()))
    return Answer(script.splitlines(), {"shell": args.shell, "script": script})


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """What a parser accepts, command by command."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in commands._choices_actions}
    return [_command(name, helps[name], command._actions) for name, command in commands.choices.items()]


def _command(name: str, help: str, actions: Sequence[argparse.Action]) -> Command:
    options = [
        Option(action.option_strings[-1], action.help or "", action.nargs != 0, _words(action))
        for action in actions
        if action.option_strings
    ]
    return Command(name, help, options, next((_words(each) for each in actions if not each.option_strings), ()))


def _words(action: argparse.Action) -> Sequence[str] | None:
    if action.choices is not None:
        return list(map(str, action.choices))
    typed = {format_rule: [*format_names(), KEEP], **dict.fromkeys((rule, positive, byte_count, problem), ())}
    return typed.get(action.type)


BASH = """\
_eformer() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=""
    [[ $word == = ]] && word=
    [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}  # bash takes --flag=value for three words
    case ${COMP_WORDS[1]}:$before:$word in
%s
    esac
    (( COMP_CWORD == 1 )) && words="%s --help --version"
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o bashdefault -o default -F _eformer eformer
"""


def bash(commands: Sequence[Command]) -> str:
    """Without an answer of the function, bash completes files."""
    words = {}
    for c in commands:
        words |= {f"{c.name}:{o.flag}:*": o.words or () for o in c.options if o.takes_value}
        words |= {f"{c.name}:*:-*": [o.flag for o in c.options], f"{c.name}:*": c.words or ()}
    cases = [f'    {pattern}) words="{" ".join(some)}" ;;' for pattern, some in words.items()]
    return BASH % ("\n".join(cases), " ".join(c.name for c in commands))


ZSH = """\
#compdef eformer
_eformer() {
    local -a commands=(%s)
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    shift words
    (( CURRENT-- ))
    case $words[1] in
%s
    esac
}
if [ "$funcstack[1]" = "_eformer" ]; then _eformer "$@"; else compdef _eformer eformer; fi
"""


def zsh(commands: Sequence[Command]) -> str:
    def escaped(text: str) -> str:
        return re.sub(r"([\\\[\]:])", r"\\\1", text)

    def value(words: Sequence[str] | None) -> str:
        return "_files" if words is None else f"({' '.join(words)})" if words else " "

    cases = []
    for c in commands:
        ends = [f":value:{value(o.words)}" if o.takes_value else "" for o in c.options]
        arguments = [f"*{o.flag}[{escaped(o.help)}]{end}" for o, end in zip(c.options, ends, strict=True)]
        cases.append(f"    {c.name}) _arguments {shlex.join([*arguments, f'*:argument:{value(c.words)}'])} ;;")
    return ZSH % (shlex.join(f"{c.name}:{escaped(c.help)}" for c in commands), "\n".join(cases))


def fish(commands: Sequence[Command]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [f"complete -c eformer -n __fish_use_subcommand -f -a {c.name} -d {quoted(c.help)}" for c in commands]
    for c in commands:
        of_command = f"complete -c eformer -n '__fish_seen_subcommand_from {c.name}'"
        if c.words is not None:
            lines.append(f"{of_command} -f -a {quoted(' '.join(c.words))}")
        for o in c.options:
            value = " -r -F" if o.words is None else f" -x -a {quoted(' '.join(o.words))}"
            flag = o.flag.removeprefix("--") + (value if o.takes_value else "")
            lines.append(f"{of_command} -l {flag} -d {quoted(o.help)}")
    return "\n".join([*lines, ""])


SCRIPTS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
