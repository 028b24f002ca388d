"""The core's handlers with random calls, for as long as it is told: `make fuzz` runs it under the sanitizers.

    python -m tests.kernels.fuzz_core --seconds 60 --seed 1
    python -m tests.kernels.fuzz_core --seed 1 --only 4321     that one again

A right call must give what the oracle gives, a wrong one an error in words, and none may end the process.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eformer._src.kernels.cpu.library import library

from .core_problems import Call, check, expected, random_call, spoil
from .core_several import random_calls
from .frames import Caller, Fence, Refused

CORE = library()
assert CORE is not None


class Fuzzer:
    """Calls of one `seed`, on one instruction set or any."""

    def __init__(self, seed: int, instruction_set: str | None = None) -> None:
        self.seed, self.sets = seed, (instruction_set,) if instruction_set else CORE.names("instruction_sets")
        self._call = Caller(CORE.handlers())
        self._fences = [Fence(1 << 22) for _ in range(30)]
        self.right = self.refused = 0

    def run(self, index: int) -> None:
        """Raises an AssertionError if what the call gives is not what it must."""
        rng = np.random.default_rng((self.seed, index))
        (self._run_several if rng.integers(5) == 0 else self._run_single)(rng, index)

    def _run_single(self, rng: np.random.Generator, index: int) -> None:
        call = random_call(rng, self.sets)
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            spoil(call, rng)
        self._call.threads, self._call.late = int(rng.integers(1, 6)), bool(rng.integers(4) == 0)
        wanted = expected(call, CORE.names("instruction_sets"))
        if rng.integers(2):
            call = self._fenced(call)
        try:
            self._call(call.target, call.args, [call.result], call.attributes)
            wrong = "it was not refused" if wanted is None else check(wanted, call.result)
            self.right += 1
        except Refused as error:
            wrong = f"it was refused: {error}" if wanted is not None else "" if len(str(error)) > 20 else "no words"
            self.refused += 1
        shapes = [(array.dtype.name, array.shape) for array in (*call.args, call.result)]
        assert not wrong, f"--seed {self.seed} --only {index}: {wrong}: {call.target} {shapes} {call.attributes}"

    def _run_several(self, rng: np.random.Generator, index: int) -> None:
        """One call for several matmuls: what each gives alone, to the bit."""
        calls = random_calls(rng, self.sets)
        self._call.threads, self._call.late = int(rng.integers(1, 6)), bool(rng.integers(4) == 0)
        wanted = calls.expected(CORE.names("instruction_sets"))
        args = calls.args
        if rng.integers(2):
            args = [fence(array) for fence, array in zip(self._fences, args, strict=False)]
        try:
            self._call("eformer_matmuls", args, calls.results, calls.attributes)
            wrong = "it was not refused" if wanted is None else ""
            for each, call in zip(wanted or (), calls.single, strict=False):
                wrong = wrong or check(each, call.result)
                alone = np.empty_like(call.result)
                self._call(call.target, call.args, [alone], call.attributes)
                wrong = wrong or ("" if np.array_equal(alone, call.result, equal_nan=True) else "it differs alone")
            self.right += 1
        except Refused as error:
            wrong = f"it was refused: {error}" if wanted is not None else "" if len(str(error)) > 20 else "no words"
            self.refused += 1
        shapes = [(array.dtype.name, array.shape) for array in (*calls.args, *calls.results)]
        assert not wrong, f"--seed {self.seed} --only {index}: {wrong}: {shapes} {calls.attributes}"

    def _fenced(self, call: Call) -> Call:
        arrays = [fence(array) for fence, array in zip(self._fences, (call.result, *call.args), strict=False)]
        return Call(call.target, arrays[1:], arrays[0], call.attributes)


def until(seconds: float) -> Iterator[int]:
    start, index = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        yield index
        index += 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Random calls of the native core.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--set", help="the instruction set of all calls; default: a random one of each")
    parser.add_argument("--only", type=int, help="the number of one call")
    parser.add_argument("--last", type=Path, help="a file that says, if the process ends, in which call it was")
    args = parser.parse_args()
    fuzzer = Fuzzer(args.seed, args.set)
    print(f"seed {args.seed}, instruction sets {', '.join(fuzzer.sets)}", flush=True)
    last = os.open(args.last, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) if args.last else None
    printed = time.monotonic()
    for index in [args.only] if args.only is not None else until(args.seconds):
        if last is not None:
            os.pwrite(last, f"--seed {args.seed} --only {index:<12}\n".encode(), 0)
        fuzzer.run(index)
        if time.monotonic() - printed > 10:
            printed = time.monotonic()
            print(f"{index + 1} calls: {fuzzer.right} right, {fuzzer.refused} refused", flush=True)
    print(f"{fuzzer.right + fuzzer.refused} calls, {fuzzer.right} right, {fuzzer.refused} refused, nothing wrong")


if __name__ == "__main__":
    main()
