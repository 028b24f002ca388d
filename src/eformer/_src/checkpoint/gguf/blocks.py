"""The types of GGUF: the bytes of a block hold 32 or 256 elements of a row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eformer._src.checkpoint.header import DTYPES


class Type(NamedTuple):
    """A tensor type: its name, and the elements and bytes of one block."""

    name: str
    elements: int
    bytes: int


# Number, name, elements and bytes of a block. The numbers are from the specification
# (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), the sizes from the package `gguf`.
_TABLE = """
    0 F32 1 4; 1 F16 1 2; 2 Q4_0 32 18; 3 Q4_1 32 20; 6 Q5_0 32 22; 7 Q5_1 32 24;
    8 Q8_0 32 34; 9 Q8_1 32 40; 10 Q2_K 256 84; 11 Q3_K 256 110; 12 Q4_K 256 144; 13 Q5_K 256 176;
    14 Q6_K 256 210; 15 Q8_K 256 292; 16 IQ2_XXS 256 66; 17 IQ2_XS 256 74; 18 IQ3_XXS 256 98; 19 IQ1_S 256 50;
    20 IQ4_NL 32 18; 21 IQ3_S 256 110; 22 IQ2_S 256 82; 23 IQ4_XS 256 136; 24 I8 1 1; 25 I16 1 2;
    26 I32 1 4; 27 I64 1 8; 28 F64 1 8; 29 IQ1_M 256 56; 30 BF16 1 2; 34 TQ1_0 256 54;
    35 TQ2_0 256 66; 39 MXFP4 32 17; 40 NVFP4 64 36; 41 Q1_0 128 18; 42 Q2_0 64 18
"""
TYPES: dict[int, Type] = {
    int(number): Type(name, int(elements), int(size))
    for number, name, elements, size in map(str.split, _TABLE.split(";"))
}
IDS: dict[str, int] = {kind.name: number for number, kind in TYPES.items()}

# Types without blocks are named as in safetensors.
PLAIN: dict[str, np.dtype] = {form.name: DTYPES[form.name] for form in TYPES.values() if form.elements == 1}

# Types that files had once; their numbers are not used again.
GONE = {
    **dict(zip((4, 5), ("Q4_2", "Q4_3"), strict=True)),
    **dict(zip((31, 32, 33), ("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8"), strict=True)),
    **dict(zip((36, 37, 38), ("IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8"), strict=True)),
}
