"""How a format is asked for: "int4", "INT4", "int4,block_size=32" or a `Format`, with options in the text or beside it.

Every function, rule and command that takes a format reads it here, so that one spelling works everywhere.
"""

from __future__ import annotations

import ast
import difflib
import enum
import re
from collections.abc import Mapping
from typing import Literal, NewType, TypeAlias

from .registry import IMPORTANCE, Format, find_format


class QuantizationType(enum.StrEnum):
    """The formats that come with the package; every other registered format is named by a plain string."""

    NF4 = "nf4"
    INT8 = "int8"
    TERNARY = "ternary"
    BINARY = "binary"
    INT2 = "int2"
    INT3 = "int3"
    INT4 = "int4"
    INT5 = "int5"
    INT6 = "int6"
    INT8_GROUPED = "int8_grouped"
    FP8 = "fp8"
    FP8_E5M2 = "fp8_e5m2"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"


# The same names for editors and type checkers, by the class that each makes.
NF4Name: TypeAlias = Literal["nf4", QuantizationType.NF4]
Int8Name: TypeAlias = Literal["int8", QuantizationType.INT8]
OneBitName: TypeAlias = Literal["ternary", "binary", QuantizationType.TERNARY, QuantizationType.BINARY]
IntegerName: TypeAlias = Literal["int2", "int3", "int4", "int5", "int6", "int8_grouped"]
IntegerType: TypeAlias = Literal[
    QuantizationType.INT2,
    QuantizationType.INT3,
    QuantizationType.INT4,
    QuantizationType.INT5,
    QuantizationType.INT6,
    QuantizationType.INT8_GROUPED,
]
GroupedName: TypeAlias = (
    IntegerName | IntegerType | Literal["mxfp4", "nvfp4", QuantizationType.MXFP4, QuantizationType.NVFP4]
)
Float8Name: TypeAlias = Literal["fp8", "fp8_e5m2", QuantizationType.FP8, QuantizationType.FP8_E5M2]
FormatName: TypeAlias = NF4Name | Int8Name | OneBitName | GroupedName | Float8Name
# For type checkers, which refuse a text that is no name of ours: "nf5". So say of a text with options, of a name that
# another package registered, and of one that only running tells, that it is meant: `FormatSpec("int4,block_size=64")`.
FormatSpec = NewType("FormatSpec", str)
FormatLike: TypeAlias = FormatName | FormatSpec | Format

# What other libraries call our options, and what people write for them.
SYNONYMS = {
    "block_size": ("blocksize", "block", "group_size", "groupsize", "group", "q_group_size", "g"),
    "double_quantization": ("double_quant", "use_double_quant", "double", "nested", "compress_statistics"),
    "symmetric": ("sym", "is_symmetric", "zero_point", "asymmetric"),
    "axis": ("dim", "channel_axis", "quant_axis", "contracted_axis", "axes"),
    "activation_dtype": ("activations", "act_dtype", "activation", "input_dtype"),
    "use_kernel": ("kernel", "use_kernels"),
    "block_shape": ("tile_shape", "weight_block_size"),
    "fit": ("fitted", "search", "mse", "optimize"),
    IMPORTANCE: ("imatrix", "weights", "sensitivity"),
}
_MEANT = {other: name for name, others in SYNONYMS.items() for other in others}
_SPEC = re.compile(r"\s*(?P<name>\w+)\s*(?P<options>(,\s*\w+\s*=\s*(\([^()]*\)|[^,()=]+))*)\s*")
_OPTION = re.compile(r",\s*(\w+)\s*=\s*(\([^()]*\)|[^,()=]+)")


def read_format(
    format: object, options: Mapping[str, object] | None = None, *, also: tuple[str, ...] = ()
) -> tuple[Format, dict[str, object]]:
    """The format that `format` asks for, and its options: those in the text, and those given beside it.

    An option that the format lacks raises a TypeError, unless it is in `also`: the caller's own options.
    """
    inside: dict[str, object] = {}
    if isinstance(format, Format):
        form = format
    elif isinstance(format, str) and ("," in format or "=" in format):
        found = _SPEC.fullmatch(format)
        if found is None:
            raise ValueError(
                f"{format!r} is no format with options: write 'int4,block_size=32', with `name=value` after each comma"
            )
        form, inside = find_format(found["name"]), read_options(found["options"])
    else:
        form = find_format(format)
    given = dict(options or {})
    twice = inside.keys() & given.keys()
    if twice:
        name = min(twice)
        raise TypeError(f"`{name}` is given twice: {inside[name]!r} in {format!r}, and {given[name]!r} beside it")
    found_options = {**inside, **given}
    check_options(form, found_options, also)
    return form, found_options


def read_options(text: str) -> dict[str, object]:
    """The options of ",block_size=32,symmetric=true"."""
    return {name: _value(value) for name, value in _OPTION.findall(text)}


def _value(text: str) -> object:
    """A number, true, false, none, a tuple in parentheses, or else a string."""
    text = text.strip()
    word = text.capitalize()
    try:
        return ast.literal_eval(word if word in ("True", "False", "None") else text)
    except (ValueError, SyntaxError):
        return text


def check_options(form: Format, options: Mapping[str, object], also: tuple[str, ...] = ()) -> None:
    """A TypeError that lists the options of the format, and says which was meant, unless it has all of these."""
    known = (*form.options, *[IMPORTANCE] * form.takes_importance, *also)
    for name in options:
        if name not in known:
            raise TypeError(no_option(form, name, also))


def no_option(form: Format, name: str, also: tuple[str, ...] = ()) -> str:
    has = ", ".join(
        repr(option) for option in (*form.options, *also) if option not in ("use_kernel", "activation_dtype")
    )
    return f"the format {form.name!r} has no option {name!r}; it has {has or 'none'}{_hint(form, name, also)}"


def _hint(form: Format, name: str, also: tuple[str, ...]) -> str:
    if name.lower() in ("bits", "nbits", "num_bits", "n_bits", "wbits", "w_bit", "bit"):
        return ". The number of bits is in the name of the format: 'int4', 'int3', 'int8'"
    if name in ("quant_type", "qtype", "scheme", "method_name"):
        return ". What is stored is the format itself: 'int4', 'nf4', 'fp8'"
    if _MEANT.get(name.lower(), name.lower()) == "block_size" and "block_size" not in form.options:
        return ". Its scales are per slice; 'int8_grouped', 'int4' and 'nf4' have blocks"
    names = [*form.options, *[IMPORTANCE] * form.takes_importance, *also]
    meant = _MEANT.get(name.lower()) or next(iter(difflib.get_close_matches(name.lower(), names, 1, 0.7)), None)
    return f". Did you mean {meant!r}?" if meant in names else ""
