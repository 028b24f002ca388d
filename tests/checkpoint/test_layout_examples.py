"""Every layout of another project has a small valid example, which is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eformer._src.checkpoint.prequantized.layout import LAYOUTS, Layout, PrequantizedEntry
from eformer.checkpoint import CheckpointError, open_checkpoint

from .layout_examples import Example, examples, write_folder


@pytest.mark.parametrize("example", examples().values(), ids=examples())
def test_examples(example: Example, tmp_path: Path):
    tensors = {f"layer.{name}": each for name, each in example.tensors.items()}
    folder = write_folder(tmp_path, tensors, example.config, example.said("layer."))
    if example.refused:
        with pytest.raises(CheckpointError, match="not read here"):
            open_checkpoint(folder)
        return
    with open_checkpoint(folder) as checkpoint:
        assert len(checkpoint) == 1
        info = checkpoint.info(*checkpoint)
        made = checkpoint.entry(*checkpoint).host()
    assert info.format is not None
    assert (made.shape, made.dtype) == (info.shape, info.dtype)


def _has(layout: Layout, name: str, tensors: Mapping[str, Any]) -> bool:
    prefix = name.removesuffix(layout.needs[0])
    return name.endswith(layout.needs[0]) and all(prefix + end in tensors for end in layout.needs)


def test_every_layout_has_an_example(tmp_path: Path):
    seen = set()
    for example in examples().values():
        tensors = {f"layer.{name}": each for name, each in example.tensors.items()}
        if not example.refused:
            with open_checkpoint(write_folder(tmp_path, tensors, example.config, example.said("layer."))) as checkpoint:
                entry = checkpoint.entry(*checkpoint)
            assert isinstance(entry, PrequantizedEntry)
            seen.add(id(entry._layout))
            continue
        fits = [each for each in LAYOUTS if any(_has(each, name, tensors) for name in tensors)]
        seen.add(id(fits[0]))
    missing = [(layout.kind, layout.name, layout.needs) for layout in LAYOUTS if id(layout) not in seen]
    assert not missing, "add one to layout_examples.py"


def of_weights(**more: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": more}}}


# What a configuration may not say of the example.
CONTRADICTIONS: dict[str, list[Any]] = {
    "gptq": [{"bits": 8}, {"bits": 0}, {"group_size": 64}],
    "awq": [{"bits": 8}, {"group_size": 64}],
    "pack-quantized": [of_weights(num_bits=8), of_weights(group_size=64), of_weights(type="float")],
    "pack-quantized, permuted": [of_weights(num_bits=4, group_size=128)],
    "int-quantized": [of_weights(num_bits=16), of_weights(group_size=3), of_weights(type="float")],
    "int-quantized, asymmetric": [{"format": "float-quantized"}, of_weights(num_bits=0)],
    "float-quantized": [of_weights(num_bits=4), of_weights(type="int"), of_weights(group_size=2, type="float")],
    "mxfp8-quantized": [of_weights(group_size=64, type="float"), {"format": "pack-quantized"}],
    "mxfp4-pack-quantized": [of_weights(num_bits=8), of_weights(type="float", group_size=16), of_weights(type="int")],
    "mxfp6-pack-quantized": [of_weights(num_bits=4), {"format": "mxfp4-pack-quantized"}],
    "nvfp4-pack-quantized": [of_weights(num_bits=4, group_size=32), of_weights(type="int")],
    "nvfp4 of ModelOpt": [{"quant_algo": "FP8"}, {"quant_algo": "NVFP4", "group_size": 32}],
    "mlx affine": [{"mode": "mxfp4"}, {"bits": 8, "group_size": 32}],
    "mlx mxfp4": [{"mode": "nvfp4"}, {"bits": 8}, {"group_size": 64}, {"layer": {"mode": "affine"}}],
    "mlx nvfp4": [{"mode": "affine"}, {"bits": 3}, {"group_size": 32}],
    "mlx mxfp8": [{"mode": "affine"}, {"bits": 4}, {"group_size": 64}],
    "fp8": [{"weight_block_size": [64, 64]}, {"weight_block_size": "x"}, {"weight_block_size": [2]}, {"fmt": "e5m2"}],
}  # fmt: skip
METHODS = {"nvfp4 of ModelOpt": "modelopt", "fp8": "fp8"}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_configuration_that_says_something_else_is_refused(name: str, tmp_path: Path):
    example = examples()[name]
    tensors = {f"layer.{end}": each for end, each in example.tensors.items()}
    method = {"quant_method": METHODS[name]} if name in METHODS else {}
    for said in CONTRADICTIONS[name]:
        with pytest.raises(CheckpointError, match=r"(configuration|config\.json) says"):
            open_checkpoint(write_folder(tmp_path, tensors, {**example.config, **method, **said}))


def test_one_scheme_of_several_has_to_fit(tmp_path: Path):
    example = examples()["int-quantized"]
    tensors = {f"layer.{end}": each for end, each in example.tensors.items()}
    groups = {"a": {"weights": {"num_bits": 4, "type": "float"}}, "b": {"weights": {"num_bits": 8, "type": "int"}}}
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    open_checkpoint(write_folder(tmp_path, tensors, config)).close()
