"""Random calls of several matmuls that share x, some of whose buffers are stacks, and what each must give."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .core_problems import Call, Expected, expected, random_matmul, random_x, spoil

NUMBERS = ("rows", "cols", "packed_axis", "contracted_axis", "block_size", "superblock_size", "round_x", "round_values")
INDICES = [-(2**31), -1, 0, 0, 1, 1, 2, 3, 2**31 - 1]


@dataclasses.dataclass
class Calls:
    """The single calls, and the one that stands for all of them."""

    single: list[Call]
    args: list[np.ndarray]
    attributes: dict[str, Any]
    is_broken: bool  # so that it must be refused, whatever the single ones give

    @property
    def results(self) -> list[np.ndarray]:
        return [call.result for call in self.single]

    def expected(self, sets: tuple[str, ...]) -> list[Expected] | None:
        found = [expected(call, sets) for call in self.single]
        right = [each for each in found if each is not None]
        return right if len(right) == len(found) and not self.is_broken else None


def random_calls(rng: np.random.Generator, instruction_sets: tuple[str, ...]) -> Calls:
    """Up to three matmuls; one of them, or the call itself, may be spoilt."""
    x = random_x(rng, int(rng.choice([0, 1, 1, 1, 2])), int(rng.choice([0, 1, 30, 64, 96, 256, 300])))
    single = [random_matmul(rng, instruction_sets, x) for _ in range(rng.integers(1, 4))]
    if rng.integers(3) == 0:
        one = single[rng.integers(len(single))]
        spoil(one, rng)
        x = one.args[0]
    instruction_set = single[rng.integers(len(single))].attributes["instruction_set"]
    for call in single:  # these they share
        call.args[0], call.attributes["instruction_set"] = x, instruction_set
    index = int(rng.choice(INDICES))
    length = int(rng.integers(1, 4)) if rng.integers(2) else 0
    buffers = [_stacked(rng, buffer, x, index, length) for call in single for buffer in call.args[1:]]
    attributes = {
        "format": " ".join(call.attributes["format"] for call in single),
        "instruction_set": instruction_set,
        "scale_names": ";".join(call.attributes["scale_names"] for call in single),
        "buffer_count": np.array([len(call.args) - 1 for call in single], np.int64),
        "is_stack": np.array([is_stack for _, is_stack in buffers], np.int64),
    }
    attributes |= {name: np.array([call.attributes[name] for call in single], np.int64) for name in NUMBERS}
    calls = Calls(single, [x, np.array(index, np.int32), *(buffer for buffer, _ in buffers)], attributes, False)
    if rng.integers(6) == 0:
        _break(calls, rng)
    return calls


def _stacked(rng: np.random.Generator, buffer: np.ndarray, x: np.ndarray, index: int, length: int) -> Any:
    """The buffer, or a stack of `length` in which `index` chooses it; and which of both."""
    count = x.shape[0] if x.ndim else 0
    if not length or not count or not buffer.ndim or buffer.shape[0] != count or rng.integers(5) == 0:
        return buffer, False
    chosen = min(max(index, 0), length - 1)
    others = [rng.permutation(buffer.reshape(-1)).reshape(buffer.shape) for _ in range(length)]
    return np.concatenate([buffer if i == chosen else other for i, other in enumerate(others)]), True


def _break(calls: Calls, rng: np.random.Generator) -> None:
    """Changes what the matmuls share, in a way that no call can have."""
    attributes = calls.attributes
    arrays = sorted(name for name, value in attributes.items() if isinstance(value, np.ndarray))
    name = arrays[rng.integers(len(arrays))]
    kind = rng.integers(5)
    if kind == 0:
        attributes[name] = attributes[name][:-1].copy()
    elif kind == 1:
        attributes[name] = np.append(attributes[name], 1)
    elif kind == 2:
        other = attributes["buffer_count"].copy()
        other[rng.integers(len(other))] += int(rng.choice([-(2**63), -1, 1, 2**62]))
        attributes["buffer_count"] = other
    elif kind == 3:
        attributes["format"] += " int8"
    else:
        calls.args[1] = np.zeros(rng.integers(2, size=rng.integers(1, 3)), np.int32) if rng.integers(2) else np.array(0)
    calls.is_broken = True
