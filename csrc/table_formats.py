"""Writes the C++ headers of the formats that are a table: CMakeLists.txt runs it.

    python csrc/table_formats.py src/eformer/_src/quantization/formats BUILD/formats

Each call `register_table_format("log4", (-1, -0.5, 0.5, 1), ...)` in a Python file gives a header. A checksum of the
values is in its name, so that no array takes a core of other values for its own. The files run here without the
package, which is not installed yet.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

HEADER = """\
// Made by csrc/table_formats.py of the table in {source}.
#pragma once

#include "matrix/format.h"

namespace eformer::EFORMER_ISA {{

constexpr float k{struct}Table[16] = {{{values}}};

struct {struct} : FormatDefaults {{
  static constexpr const char* kName = "{name}";
  static constexpr int kPlaneBits[] = {{4}};
  static constexpr ScaleKind kScales = ScaleKind::kPerBlock;
  static constexpr float kInt8Steps = {steps};
  static constexpr float Value(int code) {{ return k{struct}Table[code]; }}
}};

}}  // namespace eformer::EFORMER_ISA
"""
LARGEST = 127  # of int8
TABLES = "eformer._src.quantization.tables"  # what a file that registers tables imports


def tables(file: Path) -> dict[str, list[float]]:
    """The values of each table that the file registers, by name."""
    found: dict[str, list[float]] = {}

    def register_table_format(name: str, values: Iterable[float], *_: object, **__: object) -> None:
        if not name.isidentifier():
            sys.exit(f"{file}: the name of a format is that of a struct in C++, too: {name!r} cannot be")
        given = [float(value) for value in values]
        table = given + given[-1:] * (16 - len(given))  # as `checked_table` pads
        found[f"{name}_{zlib.crc32(struct.pack('<16f', *table)):08x}"] = table  # as `kernel_name` says

    parts = TABLES.split(".")
    stubs = {name: ModuleType(name) for name in (".".join(parts[:i]) for i in range(1, len(parts) + 1))}
    for stub in stubs.values():
        vars(stub)["__path__"] = []
    vars(stubs[TABLES])["register_table_format"] = register_table_format
    sys.modules |= stubs
    try:
        exec(compile(file.read_text(), file, "exec"), {"__name__": file.stem})
    except ImportError as error:
        sys.exit(f"{file}: {error}. A file that registers tables may import `{TABLES}` and what Python has, no more.")
    return found


def int8_steps(values: list[float]) -> float:
    """What values are multiplied by to be integers of int8: exactly, if a power of two does it."""
    largest = max(map(abs, values))
    powers = (2.0**i for i in range(-20, 20))
    exact = (step for step in powers if largest * step <= LARGEST and all((v * step).is_integer() for v in values))
    return next(exact, LARGEST / largest)


def header(name: str, values: list[float], source: str) -> str:
    written = ", ".join(map(as_float, values))
    parts = {"source": source, "name": name, "struct": name[0].upper() + name[1:]}  # as CMakeLists.txt writes it
    return HEADER.format(**parts, values=written, steps=as_float(int8_steps(values)))


def as_float(value: float) -> str:
    return f"static_cast<float>({value!r})"


def main() -> None:
    sources, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    files = [file for file in sorted(sources.glob("*.py")) if "register_table_format" in file.read_text()]
    made = {name: header(name, values, file.name) for file in files for name, values in tables(file).items()}
    for stale in {file.stem for file in out.glob("*.h")} - made.keys():
        (out / f"{stale}.h").unlink()
    for name, text in made.items():
        file = out / f"{name}.h"
        if not file.exists() or file.read_text() != text:  # else all kernels would be compiled again
            file.write_text(text)


if __name__ == "__main__":
    main()
