"""Text to tokens and back, and the chat template, from a GGUF file or a Hugging Face folder."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from .chat import render

SPECIAL = 3, 4  # GGUF's types of tokens: control, and defined by the user; no text is split into them
# How text is cut before pairs are merged: the expressions that these models were trained with.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Tokens that end a text, whatever else the file says.
ENDS = "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>"
LONG = 64  # characters of a word; a longer one has too many parts to list
CUTS = {"gpt-2": (GPT2,), "gpt2": (GPT2,), "smollm": (r"\p{N}", GPT2), "qwen2": (QWEN2,)}


class Tokenizer:
    """`encode` and `decode` text; `chat` makes the prompt of a conversation; `ends` are the tokens that end a text."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        template: str | None,
        ends: Iterable[int | None],
        beginning: int | None = None,
        source: str | None = None,
        pieces: Callable[[], tuple[list[bytes], list[int]]] | None = None,
    ) -> None:
        self.source, self._pieces = source, pieces  # the path of tokenizer.json; or what tokens stand for
        self._encode, self._decode, self._template, self._beginning = encode, decode, template, beginning
        self.ends = tuple(sorted({end for end in ends if end is not None}))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "")
        if kind != "llama" and (kind != "gpt2" or cut not in CUTS):
            raise ValueError(
                f"the tokenizer of the file is {kind!r} with the pre-tokenizer {cut!r}; this code reads 'llama', and "
                f"'gpt2' with {', '.join(CUTS)}. A Hugging Face folder brings its own tokenizer.json"
            )
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        if len(types) != len(tokens):
            raise ValueError(f"the file has {len(tokens)} tokens, and the types of {len(types)}")
        special = _found(tokens, map(SPECIAL.__contains__, types))
        ends = [metadata.get("tokenizer.ggml.eos_token_id"), *map(special.get, ENDS)]
        if kind == "llama":
            spaced = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
            made = Scored(tokens, metadata["tokenizer.ggml.scores"], types, special, spaced=spaced)
        else:
            made = BytePairs(tokens, metadata["tokenizer.ggml.merges"], CUTS[cut], special)
        beginning = (
            metadata.get("tokenizer.ggml.bos_token_id") if metadata.get("tokenizer.ggml.add_bos_token") else None
        )
        template = metadata.get("tokenizer.chat_template")
        return cls(made.encode, made.decode, template, ends, beginning, pieces=made.pieces)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """From tokenizer.json, tokenizer_config.json and generation_config.json; only the first must be there."""
        tokenizers = _package("tokenizers")
        if not (folder / "tokenizer.json").exists():
            raise ValueError(f"{folder} has no tokenizer.json, so its text can't be cut into tokens")
        made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        generation = read_json(folder / "generation_config.json")
        template = read_json(folder / "tokenizer_config.json").get("chat_template")
        if (folder / "chat_template.jinja").exists():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        ends = generation.get("eos_token_id", [])
        ends = [ends] if isinstance(ends, int) else ends
        ends, source = [*ends, *map(made.token_to_id, ENDS)], str(folder / "tokenizer.json")
        return cls(lambda text: made.encode(text).ids, made.decode, template, ends, source=source)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; the names of special tokens in it become these."""
        return [*([] if self._beginning is None else [self._beginning]), *self._encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without the special ones."""
        return self._decode(list(tokens))

    def pieces(self) -> tuple[list[bytes], list[int]]:
        """The bytes that each token stands for, and the special tokens, which stand for none."""
        if self._pieces is None:
            raise ValueError("this tokenizer does not tell the bytes of its tokens")
        return self._pieces()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt after which the model answers the last of `messages`, each a role and its content."""
        if not self._template:
            raise ValueError(
                "the model has no chat template: it continues texts (`eformer run --raw`), and answers no questions"
            )
        return render(self._template, messages)


class Vocabulary:
    """Tokens by number. Names of special tokens stand for themselves; a subclass cuts the text between them."""

    def __init__(self, tokens: Sequence[str], special: Mapping[str, int]) -> None:
        self._tokens, self._special = tokens, special
        names = sorted(special, key=len, reverse=True)  # of two that fit, the longer one
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def encode(self, text: str) -> list[int]:
        found, at = [], 0
        for name in self._names.finditer(text):
            found += [*self._plain(text[at : name.start()]), self._special[name[0]]]
            at = name.end()
        return [*found, *self._plain(text[at:])]

    def _plain(self, text: str) -> list[int]:
        """The tokens of a text without names of special ones."""
        raise NotImplementedError


class BytePairs(Vocabulary):
    """Byte pair encoding by the tokens and merges of a GGUF file.

    `tokenizers.models.BPE` gives the same. It copies all of the vocabulary first, which takes 0.1 s and 70 MB for
    150,000 tokens; here the lists of the file are searched for what the words of a text may have.
    """

    def __init__(
        self, tokens: Sequence[str], merges: Sequence[str], cuts: Sequence[str], special: Mapping[str, int]
    ) -> None:
        super().__init__(tokens, special)
        tokenizers = _package("tokenizers")
        split = tokenizers.pre_tokenizers
        parts = [split.Split(tokenizers.Regex(cut), "isolated") for cut in cuts]
        self._cut = split.Sequence([*parts, split.ByteLevel(add_prefix_space=False, use_regex=False)])
        self._decoder = tokenizers.decoders.ByteLevel()
        self._merges = merges
        self._known: dict[str, list[int]] = {}  # words

    def decode(self, tokens: Sequence[int]) -> str:
        special = set(self._special.values())
        known = (i for i in tokens if 0 <= i < len(self._tokens) and i not in special)
        return self._decoder.decode([self._tokens[i] for i in known])

    def pieces(self) -> tuple[list[bytes], list[int]]:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
        letters = {chr(byte): byte for byte in printable}
        others = [byte for byte in range(256) if byte not in set(printable)]
        letters |= {chr(256 + i): byte for i, byte in enumerate(others)}
        special = sorted(self._special.values())
        names = set(self._special)
        found = [
            token.encode() if token in names else bytes(letters[letter] for letter in token if letter in letters)
            for token in self._tokens
        ]
        return found, special

    def _plain(self, text: str) -> list[int]:
        words = [word for word, _ in self._cut.pre_tokenize_str(text)] if text else []
        self._learn({word for word in words if word not in self._known})
        return [token for word in words for token in self._known[word]]

    def _learn(self, words: Collection[str]) -> None:
        """Find the tokens of words by merging pairs."""
        short = [word for word in words if len(word) <= LONG]
        parts = {word[i:end] for word in short for i in range(len(word)) for end in range(i + 1, len(word) + 1)}
        ids = _found(self._tokens, map(parts.__contains__, self._tokens))
        if long := " ".join(word for word in words if len(word) > LONG):  # no token has a space: its bytes are letters
            ids |= _found(self._tokens, map(long.__contains__, self._tokens))
        pairs = {f"{token[:i]} {token[i:]}" for token in ids for i in range(1, len(token))}
        ranks = _found(self._merges, map(pairs.__contains__, self._merges))
        self._known |= {word: [ids[part] for part in _merged(word, ranks) if part in ids] for word in words}


SPACE = "\u2581"  # stands for a space in tokens of SentencePiece
BYTE = 6  # GGUF's type of tokens that stand for a byte, such as <0x0A>


class Scored(Vocabulary):
    """SentencePiece's merging: of all neighbours that make a token, those with the best score are joined first."""

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        types: Sequence[int],
        special: Mapping[str, int],
        *,
        spaced: bool,
    ) -> None:
        super().__init__(tokens, special)
        self._scores, self._spaced = scores, spaced
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._silent = set(special.values())
        self._bytes = {i: int(tokens[i][1:-1], 16) for i, kind in enumerate(types) if kind == BYTE}
        self._of_byte = {value: i for i, value in self._bytes.items()}

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(
            bytes([self._bytes[i]]) if i in self._bytes else self._tokens[i].replace(SPACE, " ").encode()
            for i in tokens
            if 0 <= i < len(self._tokens) and i not in self._silent
        ).decode(errors="replace")

    def pieces(self) -> tuple[list[bytes], list[int]]:
        found = [token.replace(SPACE, " ").encode() for token in self._tokens]
        for i, byte in self._bytes.items():
            found[i] = bytes([byte])
        return found, sorted(self._silent)

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        parts: list[str | None] = list((" " if self._spaced else "") + text)
        parts = [SPACE if part == " " else part for part in parts]
        after, before = [*range(1, len(parts)), -1], [-1, *range(len(parts) - 1)]
        waiting: list[tuple[float, int, str]] = []

        def propose(left: int) -> None:
            right = after[left]
            if right >= 0 and (joined := f"{parts[left]}{parts[right]}") in self._ids:
                heapq.heappush(waiting, (-self._scores[self._ids[joined]], left, joined))

        for left in range(len(parts)):
            propose(left)
        while waiting:
            _, left, joined = heapq.heappop(waiting)
            right = after[left]
            if parts[left] is None or right < 0 or f"{parts[left]}{parts[right]}" != joined:
                continue  # one of the two was joined with another one meanwhile
            parts[left], parts[right], after[left] = joined, None, after[right]
            if after[left] >= 0:
                before[after[left]] = left
            propose(left)
            if before[left] >= 0:
                propose(before[left])
        return [token for part in parts if part is not None for token in self._of_part(part)]

    def _of_part(self, part: str) -> list[int]:
        own = self._ids.get(part)
        return [self._of_byte[byte] for byte in part.encode() if byte in self._of_byte] if own is None else [own]


def _merged(word: str, ranks: Mapping[str, int]) -> list[str]:
    """The characters of a word, joined pair by pair in the order of `ranks`."""
    parts = list(word)
    while True:
        pairs = {f"{a} {b}": a + b for a, b in itertools.pairwise(parts)}
        first = min(pairs, key=lambda pair: ranks.get(pair, math.inf), default="")
        if first not in ranks:
            return parts
        joined, at = [], 0
        while at < len(parts):
            fits = f"{parts[at]} {parts[at + 1]}" == first if at + 1 < len(parts) else False
            joined.append(pairs[first] if fits else parts[at])
            at += 1 + fits
        parts = joined


def _found(texts: Sequence[str], wanted: Iterable[bool]) -> dict[str, int]:
    """The texts that are wanted, and their indices; of equal ones the last."""
    return {texts[i]: i for i in itertools.compress(range(len(texts)), wanted)}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object")
    return found


def _package(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"text needs the package {name}: pip install tokenizers jinja2") from None
