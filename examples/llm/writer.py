"""Text in, text out: a model by its name or path, what it answers, and conversations that keep what was read."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from eformer import QuantizedArray
from eformer.checkpoint import load_adapter
from eformer.model import LoraArray

from .engine import Engine
from .files import LAYER, REST, Change, Model, Progress, load_model
from .guide import Grammars
from .models import cache_folder, find
from .quantize import AS_IN_FILE, quantizing
from .sampling import GREEDY, Sampling
from .streaming import TextStream
from .tokenizer import Tokenizer

Message = Mapping[str, str]  # "role" and "content"
AUTO = "auto"  # as in the file where it is quantized, and in INT4 where it is not
TURN = 0.05  # seconds of writing until text is shown


@dataclass(frozen=True)
class Result:
    """How an answer came about."""

    reason: str  # "stop": the model or a stop ended it; "length": there was no room for more; "closed": the reader did
    prompt_tokens: int
    read_tokens: int  # tokens of the prompt that the cache did not have
    tokens: int
    read_seconds: float
    timed_tokens: int  # but for the first ones, which may wait for compilation
    timed_seconds: float


class LanguageModel:
    """`generate` text after a prompt, or `stream` it; messages of a conversation get the model's chat template.

    What the last text and the next one have in common is not read again.
    """

    def __init__(self, model: Model, *, longest: int = 4096, seed: int = 0, rows: int = 1) -> None:
        self.params, self.config = model.params, model.config
        self.tokenizer: Tokenizer = model.tokenizer()
        self.engine = Engine(model.params, model.config, self.tokenizer.ends, rows=rows, longest=longest, seed=seed)
        self.grammars = Grammars(self.tokenizer, self.engine.vocabulary)
        self.last: Result | None = None
        self._per_token = TURN

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """The tokens of a text, or of messages."""
        return self.tokenizer.encode(prompt if isinstance(prompt, str) else self.tokenizer.chat(prompt))

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        count: int | None = None,
        sampling: Sampling = GREEDY,
        stops: Sequence[str] = (),
        schema: str | Mapping[str, Any] | None = None,
    ) -> Generator[str]:
        """The text that follows, in pieces: up to `count` tokens, or as many as there is room for.

        With a JSON schema, the text is JSON that fits it.

        Afterwards, or when the iterator is closed early, `last` says how it went.
        """
        engine, tokens = self.engine, self.encode(prompt)
        most = engine.longest - len(tokens) if count is None else min(count, engine.longest - len(tokens))
        started = time.perf_counter()
        guide = None if schema is None else self.grammars.json(schema)
        new, read = engine.begin(0, tokens, sampling.checked(), guide)
        begun = first = time.perf_counter()
        untimed = 1
        text, made, ended, reason = TextStream(self.tokenizer, stops), 1, new in self.tokenizer.ends, "closed"
        try:
            yield "" if ended else text.add([new])
            while not ended and made < most and not text.stopped:
                before = time.perf_counter()
                found = engine.write(max(1, min(most - made, int(TURN / self._per_token))))[0]
                self._per_token = (time.perf_counter() - before) / len(found)
                made, ended = made + len(found), found[-1] in self.tokenizer.ends
                if untimed == 1:
                    first, untimed = time.perf_counter(), made
                yield text.add(found[:-1] if ended else found)
            reason = "stop" if ended or text.stopped else "length"
            yield text.end()
        finally:
            engine.end(0)
            timed = made - untimed, time.perf_counter() - first
            self.last = Result(reason, len(tokens), read, made, begun - started, *timed)

    def generate(self, prompt: str | Sequence[Message], **options: Any) -> str:
        """All of what `stream` gives."""
        return "".join(self.stream(prompt, **options))


def generate(model: LanguageModel, prompt: str | Sequence[Message], **options: Any) -> str:
    """The text after a prompt, or the answer to messages; the options are those of `LanguageModel.stream`."""
    return model.generate(prompt, **options)


def stream(model: LanguageModel, prompt: str | Sequence[Message], **options: Any) -> Generator[str]:
    """The same in pieces, as they are written."""
    return model.stream(prompt, **options)


def load(
    model: str | Path,
    *,
    format: str = AUTO,
    embeddings: str = "int8",
    activations: str = "float",
    adapter: str | Path | None = None,
    longest: int = 4096,
    seed: int = 0,
    rows: int = 1,
    folder: str | Path | None = None,
    say: Callable[[str], object] = print,
    progress: Progress | None = None,
) -> LanguageModel:
    """A GGUF file, a Hugging Face folder, or a known model ("smollm2", "qwen-0.5b", ...), which is fetched once.

    Fetched models are kept in `folder`, by default in the user's cache.
    `format` is "auto" (as in the file where it is quantized, INT4 elsewhere), "file", "float32" or that of
    `eformer.quantize`, with options: "int4,block_size=32". `adapter` is a folder of PEFT's LoRA. A text takes up to
    `longest` tokens with its prompt, and the engine has `rows` of texts.
    """
    path = find(str(model), cache_folder() / "models" if folder is None else Path(folder), say)
    loaded = load_model(path, _change(format, embeddings, activations), progress)
    if adapter is not None:
        loaded = loaded._replace(params=with_adapter(loaded, adapter))
    return LanguageModel(loaded, longest=longest, seed=seed, rows=rows)


def _change(format: str, embeddings: str, activations: str) -> Change:
    if format != AUTO:
        return quantizing(format, embeddings=embeddings, activations=activations)
    kept = quantizing(AS_IN_FILE, activations=activations)
    made = quantizing("int4", embeddings=embeddings, activations=activations)
    return lambda name, array: (kept if isinstance(array, QuantizedArray) else made)(name, array)


def with_adapter(model: Model, adapter: str | Path) -> dict[str, Any]:
    """The parameters with a LoRA adapter, whose modules have the names of Hugging Face."""
    parts = {own: name for name, own in (*LAYER.items(), *REST.items())}
    names = {}
    for own in model.params:
        first, *rest = own.rsplit(".", 1)[0].split(".", 2)
        layer = f"model.layers.{rest[0]}." if first == "blk" else ""
        names[own] = f"{layer}{parts.get(rest[-1] if layer else first, own)}.{own.rsplit('.', 1)[1]}"
    adapted = load_adapter(adapter, {names[own]: array for own, array in model.params.items()})
    params = {own: adapted[name] for own, name in names.items()}
    if model.config.rope_neighbours:  # the file has rows of queries and keys in another order than the adapter
        for own, array in params.items():
            if own.endswith(("attn_q.weight", "attn_k.weight")) and isinstance(array, LoraArray):
                heads = array.a.shape[0] // model.config.head_size
                rows = array.a.reshape(heads, 2, -1, array.a.shape[1]).swapaxes(1, 2).reshape(array.a.shape)
                params[own] = LoraArray(array.base, jnp.asarray(rows), array.b, array.scaling)
    return params
