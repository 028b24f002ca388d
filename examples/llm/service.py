"""Requests for text, written side by side by one thread that owns the engine; nothing of a network is here."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .engine import Engine
from .guide import Guide
from .sampling import GREEDY, Sampling
from .streaming import TextStream
from .tokenizer import Tokenizer

STEPS = 4  # tokens of each text until texts that wait may begin


class Busy(Exception):
    """As many texts wait as may."""


@dataclass
class Job:
    """A text to write: `say(piece, reason)` is called in the thread of the service, with a reason at the end."""

    tokens: Sequence[int]
    count: int
    say: Callable[[str, str | None], object]
    sampling: Sampling = GREEDY
    stops: Sequence[str] = ()
    guide: Guide | None = None  # which tokens may come
    made: int = 0
    is_cancelled: bool = field(default=False)  # set by whoever does not want it any more

    def cancel(self) -> None:
        self.is_cancelled = True


class Service:
    """Writes jobs in the order in which they come, as many at once as the engine has rows; up to `most` wait."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, most: int = 64) -> None:
        self._engine, self._tokenizer, self._most = engine, tokenizer, most
        self._waiting: deque[Job] = deque()
        self._written: dict[int, tuple[Job, TextStream]] = {}  # by row
        self._changed, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="eformer-serve", daemon=True)
        self._thread.start()

    @property
    def vocabulary(self) -> int:
        return self._engine.vocabulary

    def submit(self, job: Job) -> None:
        """Let a job wait for its turn; raises `Busy`."""
        with self._changed:
            if self._closing or len(self._waiting) >= self._most:
                raise Busy
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """End all jobs, and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()  # at once, if it has ended already

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting or self._written)
                if self._closing:
                    break
            try:
                self._begin()
                self._write()
            except Exception as error:  # noqa: BLE001  # a bug ends the texts that it met, and not the service
                self._end_all(f"error: {type(error).__name__}: {error}")
        self._end_all("error: the server is closing")
        while self._waiting:
            self._waiting.popleft().say("", "error: the server is closing")

    def _begin(self) -> None:
        while (free := self._engine.free()) and self._waiting:
            job = self._waiting.popleft()
            if job.is_cancelled:
                continue
            try:
                token, _ = self._engine.begin(free[0], job.tokens, job.sampling, job.guide)
            except ValueError as error:
                job.say("", f"error: {error}")
                continue
            self._written[free[0]] = job, TextStream(self._tokenizer, job.stops)
            self._add(free[0], [token])

    def _write(self) -> None:
        for row, (job, _) in tuple(self._written.items()):
            if job.is_cancelled:
                self._end(row, "cancelled")
        if self._written:
            most = min(job.count - job.made for job, _ in self._written.values())
            for row, tokens in self._engine.write(max(1, min(most, STEPS))).items():
                self._add(row, tokens)

    def _add(self, row: int, tokens: Sequence[int]) -> None:
        (job, text), ended = self._written[row], tokens[-1] in self._tokenizer.ends
        job.made += len(tokens)
        piece = text.add(tokens[:-1] if ended else tokens)
        is_over = ended or text.stopped or job.made >= job.count or not self._engine.is_written(row)
        if piece and not is_over:
            job.say(piece, None)
        if is_over:
            self._end(row, "stop" if ended or text.stopped else "length", piece + text.end())

    def _end(self, row: int, reason: str, piece: str = "") -> None:
        self._engine.end(row)
        self._written.pop(row)[0].say(piece, reason)

    def _end_all(self, reason: str) -> None:
        for row in tuple(self._written):
            self._end(row, reason)
