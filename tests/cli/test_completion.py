"""Shells complete what the parsers accept."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from eformer._src.cli.commands.completion import SCRIPTS, commands_of
from eformer._src.cli.run import COMMANDS, make_parser
from eformer.ops.quantization import formats

SHELLS = {"bash": ["-n"], "zsh": ["-n"], "fish": ["--no-execute"]}
FORMATS = [form.name for form in formats()]


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    commands = commands_of(make_parser())
    return {shell: script(commands) for shell, script in SCRIPTS.items()}


def test_there_is_a_script_for_each_shell():
    assert SCRIPTS.keys() == SHELLS.keys()


def test_commands_are_those_of_the_parser():
    found = {command.name: command for command in commands_of(make_parser())}
    assert found.keys() == COMMANDS.keys()
    options = {option.flag: option for option in found["quantize"].options}
    assert options["--embeddings"].words == [*FORMATS, "keep"]
    assert options["--format"].words == [*FORMATS, "keep"]
    assert options["--report"].words is None
    assert not options["--force"].takes_value


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("word", ["quantize", "inspect", "completion", "embeddings", "traceback", *FORMATS])
def test_scripts_name_commands_options_and_formats(word: str, shell: str, scripts: dict[str, str]):
    assert word in scripts[shell]


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_valid(shell: str, scripts: dict[str, str]):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    checked = subprocess.run([shell, *SHELLS[shell]], input=scripts[shell], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_the_script(shell: str, run, scripts: dict[str, str]):
    assert run("completion", shell) == (0, scripts[shell], "")
    data = json.loads(run("completion", shell, "--json").out)
    assert data == {"shell": shell, "script": scripts[shell]}


COMPLETED = {
    "eformer ": {*COMMANDS, "--help", "--version"},
    "eformer co": {"compare", "convert", "completion"},
    "eformer quantize --form": {"--format"},
    "eformer quantize --format ": {*FORMATS, "keep"},
    "eformer quantize in out --format nf": {"nf4"},
    "eformer quantize --format = nf": {"nf4"},  # bash splits at "="
    "eformer quantize --embeddings =": {*FORMATS, "keep"},
    "eformer compare a b --sort ": {"error", "bytes_before", "bytes_after"},
    "eformer convert --to g": {"gguf"},
    "eformer completion ": set(SHELLS),
    "eformer quantize ": set(),  # files
    "eformer quantize --report ": set(),
    "eformer inspect --format ": set(),  # it has no such option
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("line", COMPLETED)
def test_bash_completes(line: str, scripts: dict[str, str]):
    words = line.split(" ")
    call = f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; _eformer"
    code = f"{scripts['bash']}\n{call}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\ncomplete -p eformer"
    ran = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True)
    *found, registered = ran.stdout.splitlines()
    assert set(found) - {""} == COMPLETED[line]
    assert "-F _eformer eformer" in registered
