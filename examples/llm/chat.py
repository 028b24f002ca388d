"""The chat template of a model: a stranger's program, run in a process of its own with little time and memory.

Jinja's sandbox keeps a template from files and from Python; it does not keep it from loops in loops, from powers of
large numbers or from texts of gigabytes. Here the system ends what takes too long or too much.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

SECONDS = 2  # of processor time; templates take milliseconds
PATIENCE = 60  # seconds until the process is ended, on a machine that is busy with other things
MEMORY = 1 << 30  # bytes
LONGEST = 1 << 20  # characters more than the messages have


def render(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt that the template makes of messages; a ValueError if it refuses them, fails, or exceeds its limits."""
    if importlib.util.find_spec("jinja2") is None:
        raise ImportError("text needs the package jinja2: pip install tokenizers jinja2")
    given = json.dumps({"path": sys.path, "template": template, "messages": list(messages)})
    command = [sys.executable, "-I", "-S", __file__]
    try:
        ran = subprocess.run(command, input=given.encode(), capture_output=True, timeout=PATIENCE, check=False)
        found = json.loads(ran.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # no answer: the system ended the process
        limits = f"{SECONDS} s, or {MEMORY >> 20} MB"
        raise ValueError(f"the chat template takes more than {limits}: it is no template of a prompt") from None
    if "error" in found:
        raise ValueError(f"the chat template {found['error']}")
    return found["text"]


def _child() -> None:
    given = json.loads(sys.stdin.buffer.read())
    sys.path[:] = given["path"]
    from jinja2 import exceptions, sandbox

    _limit()

    class Refused(Exception):
        pass

    def refuse(message: str) -> None:
        raise Refused(message)

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    most, found = LONGEST + sum(len(str(text)) for each in given["messages"] for text in each.values()), ""
    try:
        made = environment.from_string(given["template"])
        for part in made.generate(messages=given["messages"], add_generation_prompt=True):
            found += part
            if len(found) > most:
                raise ValueError(f"it writes more than {most} characters")
        answer = {"text": found}
    except Refused as error:
        answer = {"error": f"refuses the messages: {str(error)[:500]}"}
    except (exceptions.TemplateError, *FAILURES) as error:
        answer = {"error": f"fails: {str(error)[:500] or type(error).__name__}"}
    sys.stdout.write(json.dumps(answer))


FAILURES = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def _limit() -> None:
    """Ask the system to end this process when it takes too much; on Windows, `PATIENCE` is the only limit."""
    if importlib.util.find_spec("resource") is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


if __name__ == "__main__":
    _child()
