"""How far RoPE turns each pair of elements of a head: plain, or scaled for longer texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Rope(NamedTuple):
    """A kind of RoPE: "default", "linear", "llama3" or "yarn". `low` and `high` are turns within `original` tokens."""

    kind: str = "default"
    base: float = 10000.0
    factor: float = 1.0  # by which positions are divided, all or those of low frequencies
    low: float = 0.0
    high: float = 0.0
    original: int = 0  # the longest text of the training before it was scaled
    whole: bool = True  # in YaRN, frequencies change between pairs of whole numbers
    amplitude: float = 1.0  # of the rotated elements

    def frequencies(self, size: int) -> np.ndarray:
        """The angle of each of the `size / 2` pairs for one position, float32."""
        half = size // 2
        plain = self.base ** (-np.arange(half, dtype=np.float64) / half)
        if self.kind == "default":
            kept = 1.0
        elif self.kind == "linear":
            kept = 0.0
        elif self.kind == "llama3":
            turns = self.original * plain / (2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        else:
            first, last = (self._pair_with(turns, size) for turns in (self.high, self.low))
            first, last = (math.floor(first), math.ceil(last)) if self.whole else (first, last)
            first, last = max(first, 0), min(last, size - 1)
            kept = 1 - np.clip((np.arange(half) - first) / (last - first if last != first else 0.001), 0, 1)
        return (plain * (kept + (1 - kept) / self.factor)).astype(np.float32)

    def _pair_with(self, turns: float, size: int) -> float:
        """The fractional index of the pair that turns `turns` times within the original length."""
        return size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))


def rope_of(given: Mapping[str, Any], base: float, context: int | None) -> Rope:
    """The RoPE that `rope_parameters` or `rope_scaling` of a config.json describes; a ValueError for another one."""
    kind, part = given.get("rope_type", given.get("type", "default")), given.get("partial_rotary_factor", 1)
    several = any(isinstance(each, dict) for each in given.values())  # one for each kind of layer
    if kind not in ("default", "linear", "llama3", "yarn") or part != 1 or several:
        known = "default, linear, llama3 and yarn on whole heads, the same in all layers"
        raise ValueError(f"the model has RoPE {dict(given)}; this code runs {known}")
    if kind == "default":
        return Rope(base=base)
    factor = _number(given, "factor", kind)
    if kind == "linear":
        return Rope(kind, base, factor)
    original = int(_number(given, "original_max_position_embeddings", kind, context))
    if kind == "llama3":
        low, high = (_number(given, f"{each}_freq_factor", kind) for each in ("low", "high"))
        if low >= high:
            raise ValueError(
                f"RoPE of the kind llama3 needs `low_freq_factor` below `high_freq_factor`, got {low}, {high}"
            )
        return Rope(kind, base, factor, low, high, original)
    low, high = (_number(given, f"beta_{each}", kind, usual) for each, usual in (("slow", 1), ("fast", 32)))
    one, all_ = given.get("mscale"), given.get("mscale_all_dim")
    usual = _amplitude(factor, one) / _amplitude(factor, all_) if one and all_ else _amplitude(factor, 1)
    amplitude = _number(given, "attention_factor", kind, usual)
    return Rope(kind, base, factor, low, high, original, given.get("truncate", True) is not False, amplitude)


def _amplitude(factor: float, m: float) -> float:
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


def _number(given: Mapping[str, Any], key: str, kind: str, usual: float | None = None) -> float:
    found = given.get(key)
    found = usual if found is None else found
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
        raise ValueError(f"RoPE of the kind {kind} needs a positive number as `{key}`, got {found!r}")
    return float(found)
