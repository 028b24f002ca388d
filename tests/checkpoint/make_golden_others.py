"""Make others.safetensors with torchao, HQQ and quanto; run by hand, not by the tests.

    pip install torch==2.13.0 torchao==0.18.0 hqq==0.2.8.post1 optimum-quanto==0.2.7
    python -m tests.checkpoint.make_golden_others

Each case has the tensors of a linear layer "m" that the project quantized and saved. "case.expected" has the weight as
the project's own code decodes it, in float32, and the metadata has that of the project's own file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchao.quantization as ao
from hqq.core.quantize import BaseQuantizeConfig, HQQBackend, HQQLinear, Quantizer
from optimum import quanto
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

OUT, IN = 12, 64
GOLDEN = Path(__file__).parent / "others.safetensors"


class Case(NamedTuple):
    name: str
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    expected: torch.Tensor


def linear(dtype: torch.dtype, bias: bool = False) -> torch.nn.Module:
    return torch.nn.ModuleDict({"m": torch.nn.Linear(IN, OUT, bias=bias)}).to(dtype)


def torchao_cases() -> Iterator[Case]:
    groups: Callable[[str], Any] = lambda kind: ao.IntxWeightOnlyConfig(  # noqa: E731
        weight_dtype=getattr(torch, kind), granularity=ao.PerGroup(32)
    )
    configs = {
        "int8": ao.Int8WeightOnlyConfig(version=2),
        "int8-groups": ao.Int8WeightOnlyConfig(version=2, granularity=ao.PerGroup(32)),
        "float8": ao.Float8WeightOnlyConfig(),
        **{f"int{bits}-groups-intx": groups(f"int{bits}") for bits in range(1, 9)},
        "int4-asymmetric": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=ao.PerGroup(16), mapping_type=ao.MappingType.ASYMMETRIC
        ),
        "int4-dynamic": ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=ao.PerGroup(32)
        ),
        "int8-dynamic": ao.Int8DynamicActivationInt8WeightConfig(version=2),
    }
    for name, config in configs.items():
        model = linear(torch.float32)
        ao.quantize_(model, config)
        tensors, metadata = flatten_tensor_state_dict(model.state_dict())
        yield Case(f"torchao-{name}", tensors, metadata, model["m"].weight.dequantize())


def hqq_cases() -> Iterator[Case]:
    HQQLinear.set_backend(HQQBackend.PYTORCH)
    for bits, size, more in [
        (8, 32, {}),
        (4, 32, {}),
        (3, 64, {}),
        (2, 16, {}),
        (1, 32, {}),
        (4, 16, {"view_as_float": True}),
    ]:
        config = BaseQuantizeConfig(nbits=bits, group_size=size, axis=1, **more)
        made = HQQLinear(linear(torch.float32)["m"], config, compute_dtype=torch.float16, device="cpu")
        tensors = {f"m.{name}": each for name, each in made.state_dict().items() if isinstance(each, torch.Tensor)}
        meta = {**made.meta, "compute_dtype": torch.float32}
        meta |= {key: made.meta[key].float() for key in ("scale", "zero")}
        yield Case(f"hqq-{bits}" + "-float" * bool(more), tensors, {}, Quantizer.dequantize(made.W_q, meta))


def quanto_cases() -> Iterator[Case]:
    for name, kind in {"int8": quanto.qint8, "float8": quanto.qfloat8, "e5m2": quanto.qfloat8_e5m2}.items():
        model = linear(torch.float32)
        quanto.quantize(model, weights=kind)
        quanto.freeze(model)
        yield Case(f"quanto-{name}", dict(model.state_dict()), {}, model["m"].weight.dequantize())


def main() -> None:
    torch.manual_seed(0)
    tensors, metadata = {}, {}
    for case in [*torchao_cases(), *hqq_cases(), *quanto_cases()]:
        own = {**case.tensors, "expected": case.expected.detach().float()}
        tensors |= {f"{case.name}.{name}": each.contiguous() for name, each in own.items()}
        metadata[case.name] = json.dumps(case.metadata)
    save_file(tensors, GOLDEN, metadata)


if __name__ == "__main__":
    main()
