"""Make qweight.safetensors with the packages that write these layouts; run by hand, not by the tests.

    pip install torch transformers auto-round==0.16.1
    pip download --no-deps --no-binary :all: autoawq==0.2.9 gptqmodel==7.7.0   # and unpack both
    python -m tests.checkpoint.make_golden_qweight autoawq-0.2.9 gptqmodel-7.7.0

Each case has random codes, zeros and scales that a package packed. "case.expected" has the integers that the scales
multiply, as the package's own reader gives them, and the metadata has the configuration beside the file.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from safetensors.torch import save_file
from transformers.integrations import bitnet

OUT, IN, GROUP = 32, 64, 32
GOLDEN = Path(__file__).parent / "qweight.safetensors"


class Case(NamedTuple):
    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    expected: torch.Tensor  # (out, in): what the scales multiply


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def random_parts(bits: int, symmetric: bool, least: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (out, in), and zeros and scales (out, groups)."""
    codes = torch.randint(0, 2**bits, (OUT, IN))
    zeros = torch.randint(least, 2**bits, (OUT, IN // GROUP))
    zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    scales = (torch.rand(OUT, IN // GROUP) * 0.02 + 0.001).half().float()
    return codes, zeros, scales


def linear_of(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(IN, OUT, bias=False)
    made.weight.data = (codes - zeros.repeat_interleave(GROUP, 1)) * scales.repeat_interleave(GROUP, 1)
    return made


def integers(layer: torch.nn.Module) -> torch.Tensor:
    """What the scales multiply: the layer's own answer to each input, with all scales set to one."""
    layer.scales = torch.ones_like(layer.scales, dtype=torch.float32)
    return layer(torch.eye(IN)).T


def auto_round_gptq(kind: Any, bits: int, symmetric: bool, order: torch.Tensor | None = None) -> tuple[dict, Any]:
    codes, zeros, scales = random_parts(bits, symmetric)
    layer = kind.QuantLinear(bits, GROUP, IN, OUT, bias=False, g_idx=True)
    layer.device = "cpu"
    middle = 2 ** (bits - 1)
    layer.pack(linear_of(codes, zeros, scales), scales, middle if symmetric else zeros, None, "cpu")
    if order is not None:
        layer.g_idx = layer.g_idx[order]
    names = ("qweight", "qzeros", "scales", "g_idx")
    tensors = {name: getattr(layer, name).clone() for name in names if hasattr(layer, name)}
    return tensors, integers(layer)


def gptq() -> Iterator[Case]:
    for bits, symmetric in ((2, False), (3, False), (4, False), (4, True), (8, False)):
        made = auto_round_gptq(qlinear_torch_zp, bits, symmetric)
        yield Case(f"gptq-{bits}-{'sym' if symmetric else 'asym'}", {"quant_method": "gptq", "bits": bits}, *made)
    made = auto_round_gptq(qlinear_torch_zp, 4, False, torch.randperm(IN))
    yield Case("gptq-4-desc_act", {"quant_method": "gptq", "desc_act": True}, *made)
    for bits in (5,):
        config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
        yield Case(f"auto_round-{bits}", config, *auto_round_gptq(qlinear_torch_zp, bits, False))
    for bits in (6,):
        config = {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"}
        yield Case(f"auto_round-gptqmodel-{bits}", config, *auto_round_gptq(qlinear_torch, bits, False))


def gptqmodel(source: Path) -> Iterator[Case]:
    planar = module(source / "gptqmodel/utils/planar_packing.py")
    for bits in (3, 5, 7):
        codes, zeros, scales = random_parts(bits, False, least=0)
        tensors = {"qweight": planar.planar_pack_rows(codes.T, bits), "qzeros": planar.planar_pack_cols(zeros.T, bits)}
        tensors |= {"scales": scales.T.half(), "g_idx": (torch.arange(IN) // GROUP).int()}
        found = planar.planar_unpack_rows(tensors["qweight"], bits)
        found = found - planar.planar_unpack_cols(tensors["qzeros"], bits).repeat_interleave(GROUP, 0)
        config = {"quant_method": "gptq", "checkpoint_format": "gptq_p", "bits": bits}
        yield Case(f"gptq_p-{bits}", config, tensors, found.T)
    for bits, ones in ((4, 0x11111111), (8, 0x01010101)):  # convert_gptq_v2_to_v1_format_module subtracts from words
        codes, zeros, scales = random_parts(bits, False, least=0)
        zeros[::3] = 0
        v2 = planar.planar_pack_cols(zeros.T, bits)
        tensors = {"qweight": planar.planar_pack_rows(codes.T, bits), "scales": scales.T.half()}
        tensors |= {"g_idx": (torch.arange(IN) // GROUP).int()}
        expected = codes - zeros.repeat_interleave(GROUP, 1)
        config = {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": False}
        yield Case(f"gptqmodel-{bits}", config, {**tensors, "qzeros": v2 - ones}, expected)


def awq() -> Iterator[Case]:
    for bits in (4, 5):
        codes, zeros, scales = random_parts(bits, False, least=0)
        linear = linear_of(codes, zeros, scales)
        layer = WQLinear_GEMM.from_linear(linear, bits, GROUP, scales=scales.T, zeros=zeros.T, device="cpu")
        tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
        ones = torch.ones_like(layer.scales, dtype=torch.float32)
        found = dequantize_gemm(layer.qweight, layer.qzeros, ones, bits, GROUP)
        config = {"quant_method": "awq" if bits == 4 else "auto-round", "packing_format": "auto_round:auto_awq"}
        yield Case(f"awq-{bits}", config, tensors, found.T)


def autoawq(source: Path) -> Iterator[Case]:
    case = next(awq())
    ones = torch.ones_like(case.tensors["scales"], dtype=torch.float32)
    utils = module(source / "awq/utils/packing_utils.py")
    assert torch.equal(
        utils.dequantize_gemm(case.tensors["qweight"], case.tensors["qzeros"], ones, 4, GROUP).T, case.expected
    )
    stubs: Any = {name: types.ModuleType(name) for name in ("awq", "awq.utils", "awq.utils.module")}
    stubs["awq.utils.module"].try_import = lambda name: (None, "")  # of its CUDA kernels
    sys.modules.update(stubs)
    gemv = module(source / "awq/modules/linear/gemv.py").WQLinear_GEMV
    codes, zeros, scales = random_parts(4, False, least=0)
    layer = gemv.from_linear(linear_of(codes, zeros, scales), 4, GROUP, scales=scales, zeros=zeros)
    tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    expected = codes - zeros.repeat_interleave(GROUP, 1)
    yield Case("awq-gemv", {"quant_method": "awq", "version": "gemv", "group_size": GROUP}, tensors, expected)


def ternary() -> Iterator[Case]:
    values = torch.randint(-1, 2, (OUT, IN))
    packed = bitnet.pack_weights(values.clone())
    unpack = getattr(bitnet.unpack_weights, "_torchdynamo_orig_callable", bitnet.unpack_weights)
    found = unpack(packed, torch.int8)
    for kind, scale in (("bitlinear", 43.7), ("autobitlinear", 0.0229)):
        tensors = {"weight": packed.clone(), "weight_scale": torch.tensor([scale], dtype=torch.bfloat16)}
        yield Case(f"bitnet-{kind}", {"quant_method": "bitnet", "linear_class": kind}, tensors, found)


def main(autoawq_source: str, gptqmodel_source: str) -> None:
    torch.manual_seed(0)
    cases = [*gptq(), *gptqmodel(Path(gptqmodel_source)), *awq(), *autoawq(Path(autoawq_source)), *ternary()]
    tensors = {f"{case.name}.{end}": tensor for case in cases for end, tensor in case.tensors.items()}
    for case in cases:
        small = case.expected.to(torch.int16 if case.expected.abs().max() > 127 else torch.int8)
        assert torch.equal(small, case.expected.to(torch.int64))
        tensors[f"{case.name}.expected"] = small
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(tensors, GOLDEN, {case.name: json.dumps(case.config) for case in cases})
    GOLDEN.chmod(0o644)


if __name__ == "__main__":
    main(*sys.argv[1:])
