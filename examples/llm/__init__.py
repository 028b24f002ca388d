"""Language models in plain JAX, from GGUF files and Hugging Face folders: text in, text out. `python -m` runs it.

from eformer.examples.llm import load, generate, stream

model = load("smollm2")
print(generate(model, [{"role": "user", "content": "Why is the sky blue?"}], count=100))
"""

import contextlib as _contextlib
import gc as _gc
from collections.abc import Iterator as _Iterator


@_contextlib.contextmanager
def _no_collection() -> _Iterator[None]:
    """A block that makes objects to keep: looking for garbage would take a fifth of the time of importing JAX."""
    was_enabled = _gc.isenabled()
    _gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _gc.freeze()  # what was made counts as old:
            _gc.unfreeze()  # the collector does not look at all of it as soon as it is on again
            _gc.enable()


with _no_collection():
    from .caches import CACHES as CACHES
    from .files import load_model as load_model
    from .files import open_model as open_model
    from .files import read_config as read_config
    from .generation import Request as Request
    from .model import Config as Config
    from .model import empty_cache as empty_cache
    from .model import forward as forward
    from .model import hidden as hidden
    from .model import logits as logits
    from .sampling import Sampling as Sampling
    from .tokenizer import Tokenizer as Tokenizer
    from .writer import LanguageModel as LanguageModel
    from .writer import generate as generate
    from .writer import load as load
    from .writer import stream as stream
