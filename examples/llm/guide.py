"""Text that keeps to a grammar, such as JSON: which tokens may come next. The package llguidance knows grammars."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from .tokenizer import Tokenizer

ANY_JSON = '{"type": "object"}'


class Guide:
    """`allowed` are the tokens that may come next in a text; `take` the one that came."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> np.ndarray:
        """(vocabulary,): a token that ends the text is among them where the text is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        found = np.zeros(self._vocabulary, bool)
        some = np.unpackbits(bits, bitorder="little", count=min(8 * len(bits), self._vocabulary))
        found[: len(some)] = some
        if self._matcher.is_error():
            raise ValueError(f"the grammar can't go on: {self._matcher.get_error()}")
        return found

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)


class Grammars:
    """Makes guides for the tokens of a model; what the package needs of them is made once, for the first guide."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary, self._made = tokenizer, vocabulary, None

    def json(self, schema: str | Mapping[str, Any] = ANY_JSON) -> Guide:
        """JSON that fits a JSON schema; by default any object."""
        try:
            package = importlib.import_module("llguidance")
        except ImportError:
            raise ImportError("text by a grammar needs the package llguidance: pip install llguidance") from None
        if self._made is None:
            self._made = _tokens(package, self._tokenizer, self._vocabulary)
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            # No spaces but the one after commas and colons: some models would write spaces for ever.
            options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
            grammar = package.LLMatcher.grammar_from_json_schema(text, options)
        except ValueError as error:
            raise ValueError(f"this is no JSON schema: {error}") from None
        matcher = package.LLMatcher(self._made, grammar)
        if matcher.is_error():
            raise ValueError(f"the JSON schema can't be used: {matcher.get_error()}")
        return Guide(matcher, self._vocabulary)


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes], special: list[int]) -> None:
        self.tokens, self.special_token_ids = pieces, special
        self.eos_token_id, self.bos_token_id = tokenizer.ends[0], None
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


def _tokens(package: Any, tokenizer: Tokenizer, vocabulary: int) -> Any:
    ends = list(tokenizer.ends)
    if not ends:
        raise ValueError("the model has no token that ends a text, so no text by a grammar could end")
    if tokenizer.source is not None:
        return package.LLTokenizer(tokenizer.source, n_vocab=vocabulary, eos_token=ends)
    pieces, special = tokenizer.pieces()
    wrapped = package.TokenizerWrapper(_Tokens(tokenizer, pieces, special))
    return package.LLTokenizer(wrapped, n_vocab=vocabulary, eos_token=ends)
