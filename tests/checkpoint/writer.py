"""A process that has imported everything, and forks one that writes for each line of JSON it reads.

`{"writer": "save, mlx", "folder": ..., "content": 1, "sources": ...}` writes, and answers with the number of the
process; `"line": 70` kills it before the 70th line of the code that writes, and `{"wait": pid}` answers with what
became of it, as `waitpid` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from eformer._src.atomic_files import files, leftovers, locks, saving, seal
from eformer._src.checkpoint.saving import folder as saving_folder
from eformer._src.checkpoint.saving import save as save_module

from .writers import WRITERS

WATCHED = {module.__file__ for module in (files, leftovers, locks, saving, seal, saving_folder, save_module)}


def killed_at(line: int) -> None:
    """From here on this process counts lines, and ends at that one."""
    passed = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal passed
        if frame.f_code.co_filename not in WATCHED:
            return None
        passed += event == "line"
        if passed >= line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def write(asked: dict[str, Any]) -> None:
    if "line" in asked:
        killed_at(asked["line"])
    with contextlib.redirect_stdout(sys.stderr):
        code = WRITERS[asked["writer"]].write(Path(asked["folder"]), asked["content"], Path(asked["sources"]))
    os._exit(code if WRITERS[asked["writer"]].command and isinstance(code, int) else 0)


def main() -> None:
    warnings.simplefilter("ignore")  # JAX says that it has threads; it has not yet
    for text in sys.stdin:
        asked = json.loads(text)
        if "wait" in asked:
            answer = os.waitpid(asked["wait"], 0)[1]
        else:
            answer = os.fork()
            if not answer:
                write(asked)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
