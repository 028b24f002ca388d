"""`eformer completion`: a script that lets a shell complete commands, options, formats and files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._answer import Answer
from ._arguments import KEEP, byte_count, format_names, format_rule, positive, problem, rule

HELP = "print a script that completes words of this command in bash, zsh or fish"
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
    from ._run import make_parser  # which knows this command too

    script = SCRIPTS[args.shell](commands_of(make_parser()))
    return Answer(script.splitlines(), {"shell": args.shell, "script": script})


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """What a parser accepts, command by command."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in commands._choices_actions}
    return [_command(name, helps[name], command._actions) for name, command in commands.choices.items()]


def _command(name: str, help: str, actions: Sequence[argparse.Action]) -> Command:
    options = [
        Option(flag, action.help or "", action.nargs != 0, _words(action))
        for action in actions
        for flag in action.option_strings
        if flag.startswith("--")
    ]
    positional = [_words(action) for action in actions if not action.option_strings]
    return Command(name, help, options, positional[0] if positional else ())


def _words(action: argparse.Action) -> Sequence[str] | None:
    if action.choices is not None:
        return list(map(str, action.choices))
    typed = {format_rule: [*format_names(), KEEP], **dict.fromkeys((rule, positive, byte_count, problem), ())}
    return typed.get(action.type)


def bash(commands: Sequence[Command]) -> str:
    """Without an answer of the function, bash completes files."""
    values = [
        f'        {c.name}:{o.flag}) words="{" ".join(o.words or ())}" ;;'
        for c in commands
        for o in c.options
        if o.takes_value
    ]
    flags = [f'            {c.name}) words="{" ".join(o.flag for o in c.options)}" ;;' for c in commands]
    plain = [f'            {c.name}) words="{" ".join(c.words)}" ;;' for c in commands if c.words]
    return "\n".join(
        [
            "_eformer() {",
            '    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=""',
            "    [[ $word == = ]] && word=",
            "    [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}  # bash takes --flag=value for three words",
            "    case ${COMP_WORDS[1]}:$before in",
            *values,
            '    *) case "$COMP_CWORD:$word" in',
            f'        1:*) words="{" ".join(c.name for c in commands)} --help --version" ;;',
            "        *:-*) case ${COMP_WORDS[1]} in",
            *flags,
            "            esac ;;",
            "        *) case ${COMP_WORDS[1]} in",
            *plain,
            "            esac ;;",
            "        esac ;;",
            "    esac",
            '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
            "}",
            "complete -o bashdefault -o default -F _eformer eformer",
            "",
        ]
    )


def zsh(commands: Sequence[Command]) -> str:
    def argument(option: Option) -> str:
        value = f":value:{_zsh_words(option.words)}" if option.takes_value else ""
        return _quoted(f"*{option.flag}[{_zsh_escaped(option.help)}]{value}")

    cases = []
    for c in commands:
        arguments = [*map(argument, c.options), _quoted(f"*:argument:{_zsh_words(c.words)}")]
        cases += [f"    {c.name})", "        _arguments \\", *(f"            {each} \\" for each in arguments[:-1])]
        cases += [f"            {arguments[-1]}", "        ;;"]
    named = [f"        {_quoted(f'{c.name}:{_zsh_escaped(c.help)}')}" for c in commands]
    return "\n".join(
        [
            "#compdef eformer",
            "_eformer() {",
            "    local -a commands=(",
            *named,
            "    )",
            "    if (( CURRENT == 2 )); then",
            "        _describe command commands",
            "        return",
            "    fi",
            "    shift words",
            "    (( CURRENT-- ))",
            "    case $words[1] in",
            *cases,
            "    esac",
            "}",
            'if [ "$funcstack[1]" = "_eformer" ]; then _eformer "$@"; else compdef _eformer eformer; fi',
            "",
        ]
    )


def _zsh_words(words: Sequence[str] | None) -> str:
    return "_files" if words is None else f"({' '.join(words)})" if words else " "


def _zsh_escaped(text: str) -> str:
    for letter in "\\[]:":
        text = text.replace(letter, f"\\{letter}")
    return text


def fish(commands: Sequence[Command]) -> str:
    lines = [f"complete -c eformer -n __fish_use_subcommand -f -a {c.name} -d {_fish_quoted(c.help)}" for c in commands]
    for c in commands:
        of_command = f"complete -c eformer -n '__fish_seen_subcommand_from {c.name}'"
        if c.words is not None:
            lines.append(f"{of_command} -f -a {_fish_quoted(' '.join(c.words))}")
        for o in c.options:
            value = " -r -F" if o.words is None else f" -x -a {_fish_quoted(' '.join(o.words))}"
            flag = o.flag.removeprefix("--") + (value if o.takes_value else "")
            lines.append(f"{of_command} -l {flag} -d {_fish_quoted(o.help)}")
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
