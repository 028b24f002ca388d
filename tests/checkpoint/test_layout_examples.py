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
