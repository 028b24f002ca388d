"""Write the tables of docs/what-we-refuse.md from the registry: `python -m tests.checkpoint.refused_page`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from eformer._src.checkpoint.adapter_config import NOTHING, OPTIONS
from eformer._src.checkpoint.prequantized.foreign import KINDS
from eformer._src.checkpoint.prequantized.methods import METHODS, Method

PAGE = Path(__file__).parents[2] / "docs" / "what-we-refuse.md"


def code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def told_by(method: Method) -> str:
    tensors = "; or ".join(" with ".join(f"`{end}`" for end in ends) for ends in method.tensors)
    parts = [f"`quant_method` {code(method.says)}" if method.says else "", tensors]
    return "; ".join(part for part in parts if part)


def of_methods(methods: Iterable[Method]) -> str:
    rows = [f"| {m.name} | {told_by(m)} | {m.instead} |" for m in methods]
    return "\n".join(["| method | told by | what works |", "|---|---|---|", *rows])


def of_parts(methods: Iterable[Method]) -> str:
    rows = [f"| {m.name} | {m.reads} | {code((*m.only, *m.never)) or '-'} | {m.instead} |" for m in methods]
    return "\n".join(
        ["| method | read | entries that are checked | in place of the rest |", "|---|---|---|---|", *rows]
    )


def of_files() -> str:
    kinds = {kind.name: kind.instead for kind in KINDS}
    return "\n".join(["| file | what works |", "|---|---|", *(f"| {name} | {what} |" for name, what in kinds.items())])


def of_options() -> str:
    read = {option: code(json.dumps(value) for value in NOTHING.get(option, ())) or "-" for option in OPTIONS}
    rows = [f"| `{option}` | {what} | {read[option]} |" for option, what in OPTIONS.items()]
    return "\n".join(["| option | what it does | values that are read |", "|---|---|---|", *rows])


def tables() -> dict[str, str]:
    return {
        "methods": of_methods(method for method in METHODS if not method.reads),
        "parts": of_parts(method for method in METHODS if method.reads),
        "files": of_files(),
        "options": of_options(),
    }


def written(page: str) -> str:
    """The page with its tables replaced by the registry's."""
    for name, table in tables().items():
        first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        page = f"{page.partition(first)[0]}{first}{table}\n{last}{page.partition(last)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
