"""How layouts of other projects are found among the tensors of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from eformer._src.checkpoint.prequantized import layout as prequantized
from eformer._src.checkpoint.prequantized.layout import Group, Layout
from eformer._src.quantization.stored import array_from_fields
from eformer.checkpoint import CheckpointError, convert, load, open_checkpoint, save
from eformer.ops.quantization import Array8B

from .files import safetensors_file

CODES = np.arange(-6, 6, dtype=np.int8).reshape(2, 6)
SCALES = np.array([[0.5], [2.0]], np.float32)
EXPECTED = CODES * SCALES


def array(scale: Any, codes: Any) -> Array8B:
    fields = {"scale": scale, "weight": codes, "axis": (-1,), "dtype": np.dtype(np.float32)}
    return array_from_fields(Array8B, fields)


def like(group: Group) -> Array8B:
    if group.config().get("refused"):
        raise group.wrong("the configuration says so")
    scale, codes = group[".toy_scale"], group[".toy_codes"]
    structs = [jax.ShapeDtypeStruct(shape, t.dtype) for shape, t in (((2, 1), scale), (codes.shape, codes))]
    return array(*structs)


TOY = Layout(
    kind="toys",
    name="toy",
    needs=(".toy_codes", ".toy_scale"),
    may_have=(".toy_extra",),
    fits=lambda group: group[".toy_codes"].dtype == np.int8,
    like=like,
    read=lambda group, like: {
        "scale": group[".toy_scale"].view().reshape(like.scale.shape),
        "weight": group[".toy_codes"].view(),
    },
)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prequantized, "LAYOUTS", [TOY])


def tensors(prefix: str = "a.", **changed: np.ndarray) -> dict[str, np.ndarray]:
    own = {"toy_codes": CODES, "toy_scale": SCALES, "bias": np.ones(2, np.float32), **changed}
    return {prefix + end: tensor for end, tensor in own.items()}


def in_folder(folder: Path, *shards: dict[str, np.ndarray], **files: object) -> Path:
    names = {tensor: f"model-{i}.safetensors" for i, shard in enumerate(shards) for tensor in shard}
    for i, shard in enumerate(shards):
        (folder / f"model-{i}.safetensors").write_bytes(safetensors_file(shard))
    index = {"metadata": {}, "weight_map": names}
    for name, content in {"model.safetensors.index": index, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("prefix", ["", "a.", "model.layers.0.mlp."])
def test_tensors_beside_a_prefix_make_an_array(prefix: str):
    found = load(safetensors_file(tensors(prefix, toy_extra=np.ones(3, np.int32))))
    assert found.keys() == {f"{prefix}weight", f"{prefix}bias"}
    assert np.array_equal(found[f"{prefix}weight"].materialize(), EXPECTED)


def test_info_and_kind():
    with open_checkpoint(safetensors_file(tensors())) as checkpoint:
        assert checkpoint.kind == "toys"
        info = checkpoint.info("a.weight")
    assert (info.shape, info.format, info.nbytes) == ((2, 6), "toy", CODES.nbytes + SCALES.nbytes)


def test_tensors_that_do_not_fit_are_taken_for_codes():
    source = safetensors_file(tensors(toy_codes=CODES.astype(np.int16)))
    with pytest.raises(CheckpointError, match=r"'a\.toy_codes': it is int16\[2, 6\] beside 'a\.toy_scale'"):
        load(source)
    assert load(source, raw=True).keys() == {"a.toy_codes", "a.toy_scale", "a.bias"}


def test_a_group_may_be_split_over_shards(tmp_path: Path):
    whole = tensors()
    first = {"a.toy_scale": whole.pop("a.toy_scale")}
    found = load(in_folder(tmp_path, first, whole))
    assert np.array_equal(found["a.weight"].materialize(), EXPECTED)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config", {"quantization_config": {"bits": 4, "refused": True}}),
        ("config", {"compression_config": {"bits": 4, "refused": True}}),
        ("config", {"quantization": {"bits": 4, "refused": True}}),
        ("quantize_config", {"bits": 4, "refused": True}),
        ("quant_config", {"bits": 4, "refused": True}),
        ("hf_quant_config", {"quantization": {"bits": 4, "refused": True}}),
    ],
)
def test_the_configuration_beside_the_weights_is_read(name: str, content: object, tmp_path: Path):
    folder = in_folder(tmp_path, tensors(), **{name: content})
    with pytest.raises(CheckpointError, match=r"'a\.weight': the configuration says so"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"quantization_config": {}}'])
def test_a_configuration_without_a_word_on_quantization(text: str, tmp_path: Path):
    folder = in_folder(tmp_path, {"x": CODES})
    (folder / "config.json").write_text(text)
    assert load(folder).keys() == {"x"}  # not read at all


def test_a_configuration_that_is_no_json(tmp_path: Path):
    folder = in_folder(tmp_path, tensors())
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: the configuration can't be read"):
        load(folder)


def test_an_array_of_that_name_is_there_already():
    with pytest.raises(CheckpointError, match="a tensor and a quantized array"):
        load(safetensors_file({**tensors(), "a.weight": CODES}))


def test_leaves_of_a_saved_tree_stay_as_they_are(tmp_path: Path):
    tree = {"a": {"toy_codes": jnp.asarray(CODES), "toy_scale": jnp.asarray(SCALES)}}
    found = load(save(tmp_path / "model.safetensors", tree))
    assert np.array_equal(found["a"]["toy_codes"], CODES)


def test_straight_to_a_sharding():
    mesh = jax.make_mesh((2,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x", None))
    found = load(safetensors_file(tensors()), sharding={"a.weight": sharding})["a.weight"]
    assert found.weight.sharding.is_equivalent_to(sharding, 2)
    assert np.array_equal(found.materialize(), EXPECTED)


def test_converted_to_our_own(tmp_path: Path):
    (tmp_path / "from.safetensors").write_bytes(safetensors_file(tensors()))
    found = load(convert(tmp_path / "from.safetensors", tmp_path / "to.safetensors", "safetensors"))
    assert np.array_equal(found["a.weight"].materialize(), EXPECTED)
