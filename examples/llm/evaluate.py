"""A model of `lm_eval`, EleutherAI's harness, over a language model of this example.

    pip install lm_eval tokenizers jinja2
    python -m eformer.examples.llm.evaluate smollm2 --tasks arc_easy --limit 100 --format int4

Its tasks fetch their data from the Hugging Face hub; `--include FOLDER` has tasks of your own.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import lm_eval  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from .sampling import Sampling
from .score import log_likelihood
from .writer import LanguageModel, load


class EformerLM(LM):
    """What tasks ask of a model: `lm_eval.simple_evaluate(model=EformerLM(load("smollm2")), tasks=[...])`."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self._model = model

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        del disable_tqdm
        return [self._following(*request.args) for request in requests]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        del disable_tqdm
        return [self._following("", request.args[0])[0] for request in requests]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        del disable_tqdm
        found = []
        for request in requests:
            prompt, asked = request.args
            stops = asked.get("until") or []
            count = asked.get("max_gen_toks", 256)
            sampling = Sampling(asked.get("temperature", 0.0) if asked.get("do_sample") else 0.0)
            stops = [stops] if isinstance(stops, str) else stops
            found.append(self._model.generate(prompt, count=count, stops=stops, sampling=sampling))
        return found

    def _following(self, context: str, text: str) -> tuple[float, bool]:
        """Context and text are cut into tokens together, as the harness does; an empty one is the end of a text."""
        model = self._model
        tokens = model.encode(context) if context else [model.tokenizer.ends[0]]
        both = model.encode(context + text) if context else [*tokens, *model.encode(text)]
        return log_likelihood(model.params, model.config, tokens, both[len(tokens) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as of `eformer chat`")
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--limit", type=int, help="examples of each task")
    parser.add_argument("--format", default="auto")
    parser.add_argument("--include", help="a folder of tasks")
    args = parser.parse_args()
    manager = TaskManager(include_path=args.include)
    model = EformerLM(load(args.model, format=args.format))
    found = lm_eval.simple_evaluate(model=model, tasks=args.tasks, limit=args.limit, task_manager=manager)
    print(json.dumps(found["results"], indent=1, default=str))


if __name__ == "__main__":
    main()
