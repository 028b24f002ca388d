"""Text of tokens that arrive one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .tokenizer import Tokenizer

BROKEN = "\ufffd"  # what bytes decode to that are no whole character yet
PATIENCE = 64  # tokens: more of them without a whole character are no text


class TextStream:
    """`add` tokens, and get what is new of their text, up to the first of the texts `stops`, which ends it.

    It waits where a character is not complete, or where a stop may begin.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stop for stop in stops if stop)
        self._tokens: list[int] = []
        self._first = self._shown = 0  # tokens: from `first` on they are decoded, up to `shown` their text was given
        self._waiting = ""
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """The new text; nothing after a stop."""
        if self.stopped:
            return ""
        self._tokens += tokens
        # Decoded with some tokens before, since a decoder may drop a space in front of the first one.
        before, now = (self._tokenizer.decode(self._tokens[self._first : end]) for end in (self._shown, None))
        if now.endswith(BROKEN) and len(self._tokens) - self._shown < PATIENCE:
            return ""
        self._first, self._shown = self._shown, len(self._tokens)
        return self._released(now[len(before) :])

    def end(self) -> str:
        """What was waited for."""
        before, now = (self._tokenizer.decode(self._tokens[self._first : end]) for end in (self._shown, None))
        rest = "" if self.stopped else self._released(now[len(before) :]) + self._waiting
        self._waiting, self._shown = "", len(self._tokens)
        return rest

    def _released(self, new: str) -> str:
        text = self._waiting + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            return text[: min(found)]
        most = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._waiting = text[len(text) - most :]
        return text[: len(text) - most]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
