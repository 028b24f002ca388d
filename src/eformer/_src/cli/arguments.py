"""Turns the words of a command line into what the library takes; an error says what would have been right."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

from eformer._src.checkpoint.paths import check_suffix
from eformer._src.model.rules import Rule, parse_rule
from eformer._src.quantization.registry import formats
from eformer._src.quantization.spelling import FormatSpec, read_format

KEEP = "keep"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SOURCE = "a .safetensors or .gguf file, an index of shards, or a folder with one"
READS = """
Arrays that other projects quantized are recognized by their tensors and the config.json beside them, and stay
quantized: bitsandbytes, GPTQ, AWQ, compressed-tensors, FP8, MXFP4, NVFP4, MLX, BitNet, torchao, HQQ, quanto, and blocks
of GGUF. Other methods are refused by name.
"""
MIN_K = 32  # the rules for whole models quantize no weight with fewer rows


def rule(text: str) -> Rule:
    """PATTERN=FORMAT,option=value,..."""
    try:
        return parse_rule(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def format_rule(text: str) -> Rule:
    """FORMAT,option=value,...: a rule for everything."""
    if text.strip() == KEEP:
        return Rule(".", None)
    try:
        return Rule(".", *read_format(text))
    except (TypeError, ValueError) as error:
        hint = "" if "option" in str(error) else f"; {KEEP} leaves arrays as they are"
        raise argparse.ArgumentTypeError(f"{error}{hint}") from None


def format_text(rule: Rule) -> FormatSpec | None:
    """What `format_rule` read, as text; None for the word that keeps arrays as they are."""
    return None if rule.format is None else FormatSpec(str(rule).removeprefix(".="))


def format_names() -> list[str]:
    return [form.name for form in formats()]


def formats_help() -> str:
    """Every format with its options and their defaults, as lines for `--help`."""
    width = max(map(len, format_names()))
    own = {f.name: {k: v for k, v in f.options.items() if k != "activation_dtype"} for f in formats()}
    lines = [f"  {name:{width}}  {', '.join(f'{k}={v}' for k, v in options.items())}" for name, options in own.items()]
    every = "  all take activation_dtype=int8 too: faster matmuls on CPU, with activations rounded to 8 bits"
    return "\n".join(["", "formats, and their options with defaults:", *lines, every])


def add_format(parser: argparse.ArgumentParser, flag: str, help: str, **how: object) -> None:
    """Add an option that takes a format of the registry with options of its own."""
    names = f"{', '.join(format_names())} or {KEEP}"
    how = {"type": format_rule, "metavar": "FORMAT[,OPTION=VALUE...]", "help": f"{names}; {help}", **how}
    parser.add_argument(flag, **how)  # pyright: ignore[reportArgumentType]


def byte_count(text: str) -> int:
    """5GB, 500MB or a number of bytes, in units of 1000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", text.strip(), re.IGNORECASE)
    count = int(float(found[1]) * UNITS[(found[2] or "").upper()]) if found else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 5GB, 500MB or a number of bytes")
    return count


def target(text: str) -> Path:
    """A .safetensors or .gguf file, or a folder."""
    try:
        check_suffix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number


class Problem(NamedTuple):
    """A matmul of activations (m, k) and a weight (k, n)."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


def problem(text: str) -> Problem:
    """MxKxN."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if found is None or int(found[2]) < MIN_K:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no problem: write MxKxN such as 1x4096x4096, x of M rows times a weight (K, N), K >= {MIN_K}"
        )
    return Problem(*map(int, found.groups()))
