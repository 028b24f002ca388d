"""Draw the picture of the README, and write the short table of docs/benchmarks.md.

The numbers were measured before.

python benchmarks/glance.py    # reads results/peers.json and the MiniLM table of docs/quality.md; measures nothing
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chart import STYLE
from libraries import OUT_IN
from rings import markdown, rewrite

from eformer._src.svg import element, scale, text

HERE = Path(__file__).parent
BENCHMARKS, MODELS = HERE.parent / "docs" / "benchmarks.md", HERE.parent / "docs" / "quality.md"
RESULTS, PICTURE = HERE / "results" / "peers.json", HERE / "results" / "glance.svg"
GROUPS = {"INT8": "8 bits", "INT4": "4 bits", "NF4": "4 bits", "ternary": "2 bits"}  # of our weights, by how they begin
# And their rows of the MiniLM table, in all of which embeddings are INT8.
PICTURED = {
    "INT8": "int8",
    "INT4": "int4, embeddings int8",
    "NF4": "nf4, embeddings int8",
    "ternary": "ternary, embeddings int8",
}
ROWS = ("1", "8", "512")  # of x
INSTRUCTIONS = ("AMX", "AVX-512 VNNI", "AVX-512", "AVX2")  # the best first
LABELS, COLUMN, GAP, BAR, TOP = 130, 130, 64, 26, 62

Results = Sequence[Mapping[str, Any]]


class Quality(NamedTuple):
    megabytes: float
    spearman: float


class Bar(NamedTuple):
    value: float
    label: str


def qualities(page: str) -> dict[str, Quality]:
    """Rows of the MiniLM table, by name."""
    table = page.partition("| MiniLM | MB | Spearman | change |\n")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|", table, re.MULTILINE)
    return {name: Quality(float(megabytes), float(spearman)) for name, megabytes, spearman in cells}


def ours(results: Results, name: str, activations: str = "float32") -> Mapping[str, Any]:
    chosen = (r for r in results if (r["library"], r["activations"]) == ("eformer", activations))
    return next(r for r in chosen if r["weight"].startswith(name) and not r["weight"].endswith(OUT_IN))


def best_peer(results: Results, group: str, rows: str) -> str:
    peers = [r for r in results if r["group"] == group and r["library"] != "eformer" and rows in r["speed"]]
    best = max(peers, key=lambda r: r["speed"][rows])
    return f"{best['speed'][rows]:.2f}x {best['library']}, {best['activations']} x"


def columns(results: Results, found: Mapping[str, Quality]) -> dict[str, list[Bar]]:
    """A bar for float32, then one for each format."""
    models = [found["float32"], *(found[name] for name in PICTURED.values())]
    lost = [max(0.0, 1 - m.spearman / models[0].spearman) for m in models]

    def speeds(rows: str, activations: str) -> list[Bar]:
        values = [1.0, *(ours(results, name, activations)["speed"][rows] for name in PICTURED)]
        return [Bar(value, f"{value:.2f}x") for value in values]

    return {
        "MiniLM, MB": [Bar(m.megabytes, f"{m.megabytes:.1f}") for m in models],
        "quality lost": [Bar(each, f"{each:.2%}" if each else "0") for each in lost],
        "speed, one row": speeds("1", "float32"),
        "speed, 512 rows": speeds("512", "int8"),
    }


def machine(measured: Mapping[str, Any]) -> str:
    where = measured["machine"]
    best = next((name for name in INSTRUCTIONS if name in where["instructions"]), where["instructions"][0])
    return f"{where['processor']}, {where['cores']} cores, {best}"


def picture(measured: Mapping[str, Any], found: Mapping[str, Quality]) -> str:
    """An SVG with a column of bars for size, quality and speed each."""
    names, drawn = ["float32", *PICTURED], columns(measured["results"], found)
    width, height = LABELS + len(drawn) * (COLUMN + GAP), TOP + BAR * len(names) + 49
    title = "A sentence encoder with quantized weights: size, quality and speed"
    notes = [
        f"Quality: Spearman's correlation on STS-B, {found['float32'].spearman} in float32; nothing was trained.",
        f"Speed: x @ W, W {tuple(measured['shape'])}, as a multiple of JAX float32, on {machine(measured)};",
        "512 rows with activations rounded to 8 bits, one row with exact ones.",
    ]
    parts = [element("style", STYLE), text(title, 8, 20, class_="title")]
    parts += [text(note, 8, height - 35 + 15 * i, class_="note") for i, note in enumerate(notes)]
    parts += [text(name, 8, TOP + BAR * i + 17, class_="best") for i, name in enumerate(names)]
    for place, (name, bars) in enumerate(drawn.items()):
        left = LABELS + place * (COLUMN + GAP)
        at = scale(0, max(bar.value for bar in bars), 0, COLUMN)
        parts.append(text(name, left, TOP - 10, class_="best"))
        for row, bar in enumerate(bars):
            top, length = TOP + BAR * row, at(bar.value)
            kind = "ours" if row else "peer"
            parts.append(element("rect", x=left, y=top + 4, width=length, height=BAR - 8, class_=kind))
            parts.append(text(bar.label, left + length + 5, top + 17, class_="label"))
    size = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
    return element("svg", *parts, xmlns="http://www.w3.org/2000/svg", role="img", aria_label=title, **size) + "\n"


def table(results: Results) -> str:
    """Our speed with float32 x, with int8 x, and the fastest other library, for each format and number of rows."""
    lines = []
    for name, group in GROUPS.items():
        for rows in ROWS:
            cells = [f"{ours(results, name, x)['speed'][rows]:.2f}x" for x in ("float32", "int8")]
            lines.append([name, rows, *cells, best_peer(results, group, rows)])
    return markdown(["weight", "M", "float32 x", "int8 x", "fastest other library"], lines)


def main() -> None:
    measured = json.loads(RESULTS.read_text())
    PICTURE.write_text(picture(measured, qualities(MODELS.read_text())))
    k, n = measured["shape"]
    intro = f"`x (M, {k}) @ W ({k}, {n})` as a multiple of the speed of JAX float32, on {machine(measured)}:\n\n"
    rewrite(BENCHMARKS, "glance", intro + table(measured["results"]))


if __name__ == "__main__":
    main()
