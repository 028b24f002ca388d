"""The kernels compile without warnings for processors that are not here, and with the compilers that are.

GCC writes assembler, because only then it finds that an instruction is not among those of the processor.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
AVX2 = ("-DEFORMER_ISA=avx2", "-mavx2", "-mfma", "-mf16c")
NEON = ("-DEFORMER_ISA=neon", "-march=armv8-a", "-DEFORMER_NEON")
ARM = ("-DEFORMER_ISA=neon_i8mm", "-march=armv8.2-a+dotprod+i8mm", "-DEFORMER_NEON")
EMULATED = (*AVX2[1:], "-DEFORMER_EMULATE_AVX512", "-DEFORMER_VNNI")
AMX = ("-DEFORMER_ISA=amx", "-DEFORMER_AMX", "-DEFORMER_EXTENDS=avx512_vnni")
# One of each kind that loops tell apart: whole bytes, bits of several widths, tables, pairs, floats.
FORMATS = ("e4m3", "int8", "nf4", "ternary", "uint4", "uint5")
SIMDE = Path("/usr/include/simde/x86/avx512.h")  # of Debian's libsimde-dev
# Clang needs the headers of Debian's cross compiler; it may be installed with its version behind its name.
CASES = {
    "GCC, emulated AVX-512": (["g++"], ("-DEFORMER_ISA=avx512_vnni", *EMULATED)),
    "GCC, emulated AMX": (["g++"], (*AMX, *EMULATED)),
    "GCC, oldest ARM64": (["aarch64-linux-gnu-g++"], NEON),
    "GCC, ARM64": (["aarch64-linux-gnu-g++"], ARM),
    "Clang, ARM64": (["clang++", "aarch64-linux-gnu-g++"], (*ARM, "--target=aarch64-linux-gnu")),
    "Clang, AVX2": (["clang++"], AVX2),
    "Clang, portable": (["clang++"], ("-DEFORMER_ISA=portable",)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_compile(case, tmp_path):
    needed, flags = CASES[case]
    found = [next(filter(None, map(shutil.which, (name, f"{name}-14"))), None) for name in needed]
    if None in found:
        pytest.skip(f"there is no {needed[found.index(None)]}")
    if "-DEFORMER_EMULATE_AVX512" in flags and not SIMDE.exists():
        pytest.skip(f"there is no {SIMDE}")
    headers = [CSRC / "formats" / f"{name}.h" for name in FORMATS]
    uses = (f' use({header.stem.capitalize()}, "{header.stem}")' for header in headers)
    (tmp_path / "format_list.h").write_text(  # as CMakeLists.txt makes it
        "".join(f'#include "formats/{header.name}"\n' for header in headers)
        + f"#define EFORMER_FORMATS(use){''.join(uses)}\n"
    )
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")
    only = ("-fsyntax-only",) if needed[0] == "clang++" else ("-O0", "-S", "-o", tmp_path / "kernels.s")
    command = [found[0], "-std=c++17", *only, *warnings, *flags, f"-I{CSRC}", f"-I{tmp_path}"]
    done = subprocess.run([*command, CSRC / "kernels.cc"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
