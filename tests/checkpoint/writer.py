"""A process that has imported everything, and forks one that saves for each line of JSON it reads.

`{"folder": ..., "value": 3, "most": 200}` saves, and answers with the number of the process; `"line": 70` kills it
before the 70th line of the code that writes, and `{"wait": pid}` answers with what became of it, as `waitpid` does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from typing import Any

import numpy as np

from eformer import _files
from eformer.checkpoint import _leftovers, _locks, _saving, _write, save

NAMES = [f"array {i}" for i in range(4)]
SIZE = 1000
WATCHED = {module.__file__ for module in (_files, _leftovers, _locks, _saving, _write)}


def tree(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(SIZE, value, np.float32) for name in NAMES}


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


def main() -> None:
    warnings.simplefilter("ignore")  # JAX says that it has threads; it has not yet
    for text in sys.stdin:
        asked = json.loads(text)
        if "wait" in asked:
            answer = os.waitpid(asked["wait"], 0)[1]
        else:
            answer = os.fork()
            if not answer:
                if "line" in asked:
                    killed_at(asked["line"])
                save(asked["folder"], tree(asked["value"]), max_shard_bytes=asked["most"], overwrite=True)
                os._exit(0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
