"""Adapters alone, written and read as PEFT does."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.checkpoint import CheckpointError, load, load_adapter, save, save_adapter
from eformer.jaximus import implicit
from eformer.model import LoraArray, add_lora, drop_lora, quantize_model

from .files import safetensors_file


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def model() -> dict[str, Any]:
    tree = {"one": {"weight": normal(64, 80)}, "two": {"kernel": normal(80, 64, seed=1)}}
    return quantize_model(tree, format="int8")


def adapted(**options: Any) -> Any:
    tree: Any = add_lora(model(), rank=4, key=jax.random.key(0), **options)
    one, two = tree["one"]["weight"], tree["two"]["kernel"]
    tree["one"]["weight"] = LoraArray(one.base, normal(64, 4), one.b, one.scaling)
    tree["two"]["kernel"] = LoraArray(two.base, two.a, normal(4, 64), two.scaling)
    return tree


@pytest.mark.parametrize("options", [{}, {"alpha": 3.0}, {"rank_stabilized": True}])
def test_round_trip(tmp_path: Path, options: dict[str, Any]):
    tree = adapted(**options)
    found = load_adapter(save_adapter(tmp_path / "adapter", tree), model())
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert np.array_equal(one, other)


def test_several_ranks(tmp_path: Path):
    tree = adapted()
    one = tree["one"]["weight"]
    tree["one"]["weight"] = LoraArray(one.base, normal(64, 2), normal(2, 80), jnp.float32(0.25))
    found: Any = load_adapter(save_adapter(tmp_path, tree), model())
    assert (found["one"]["weight"].rank, float(found["one"]["weight"].scaling)) == (2, 0.25)
    assert (found["two"]["kernel"].rank, float(found["two"]["kernel"].scaling)) == (4, 2.0)


def test_peft_reads_ours_and_we_read_its_own(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason="torch is not installed")
        peft = pytest.importorskip("peft", reason="peft is not installed")
        tree = {"one.weight": normal(48, 64), "two.weight": normal(16, 48, seed=1)}
        net = torch.nn.Sequential()
        for name, weight in tree.items():
            layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight.data = torch.from_numpy(np.array(weight))
            net.add_module(name.removesuffix(".weight"), layer)
        config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["one", "two"], rank_pattern={"two": 3})
        theirs = peft.get_peft_model(net, config)
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.from_numpy(np.array(normal(*parameter.shape, seed=2)))
        theirs.save_pretrained(tmp_path / "theirs")
        x = normal(5, 64, seed=3)
        expected = theirs(torch.from_numpy(np.array(x))).detach().numpy()
        found: Any = load_adapter(tmp_path / "theirs", tree)
        ours = x @ found["one.weight"].T @ found["two.weight"].T
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-3)

        fresh = torch.nn.Sequential()
        for name, layer in theirs.get_base_model().named_children():
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            plain.weight.data = torch.from_numpy(np.array(tree[f"{name}.weight"]))
            fresh.add_module(name, plain)
        again = peft.PeftModel.from_pretrained(fresh, save_adapter(tmp_path / "ours", found))
        np.testing.assert_allclose(
            again(torch.from_numpy(np.array(x))).detach().numpy(), expected, rtol=1e-4, atol=1e-3
        )


STACKS = {"layers.attn.weight": (3, 64, 80), "layers.mlp.experts.kernel": (3, 2, 80, 64), "wte.embedding": (64, 96)}


def stacked(seed: int = 0) -> Any:
    """A model whose layers and experts are stacks, with an update of each."""
    weights = {name: normal(*shape) for name, shape in STACKS.items()}
    tree: Any = add_lora(weights, rank=4, key=jax.random.key(0), rules=[""])
    for name, q in tree.items():
        parts = [normal(*part.shape, seed=seed + i) for i, part in enumerate((q.a, q.b))]
        scaling = np.arange(1, 1 + q.scaling.size, dtype=np.float32).reshape(q.scaling.shape)
        tree[name] = LoraArray(weights[name], *parts, jnp.asarray(scaling))
    return tree


def test_each_matrix_of_a_stack_has_its_own_name(tmp_path: Path):
    tree = stacked()
    folder = save_adapter(tmp_path / "adapter", tree)
    names = set(load(folder / "adapter_model.safetensors", flat=True))
    assert "base_model.model.layers.2.attn.lora_A.weight" in names
    assert "base_model.model.layers.1.mlp.experts.1.lora_B.weight" in names
    assert len(names) == 2 * (3 + 6 + 1)
    found: Any = load_adapter(folder, drop_lora(tree))
    for name, expected in tree.items():
        for one, other in zip(jax.tree.leaves(found[name]), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    # The same adapter fits a model whose layers are apart.
    others = {f"layers.{i}.mlp.experts.{e}.kernel": normal(80, 64) for i in range(3) for e in range(2)}
    layers = {f"layers.{i}.attn.weight": normal(64, 80) for i in range(3)}
    apart: Any = load_adapter(folder, {**layers, **others, "wte.embedding": normal(64, 96)})
    np.testing.assert_array_equal(apart["layers.1.attn.weight"].a, tree["layers.attn.weight"].a[1])


@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        ("model.embed_tokens.weight", True),
        ("wte.weight", True),
        ("tok_embeddings.weight", True),
        ("embed.embedding", True),
        ("embed_out.weight", False),
        ("vision.patch_embed.weight", False),
        ("embedder.proj.weight", False),
    ],
)
def test_an_embedding_is_written_as_peft_writes_it(tmp_path: Path, name: str, embedding: bool):
    """PEFT has `lora_embedding_A` (rank, vocabulary) for an embedding (vocabulary, width)."""
    tree = {name: LoraArray(normal(64, 80), normal(64, 4), normal(4, 80), jnp.float32(2))}
    folder = save_adapter(tmp_path, tree)
    module = f"base_model.model.{name.removesuffix('.weight').removesuffix('.embedding')}"
    tensors = load(folder / "adapter_model.safetensors", flat=True)
    if embedding:
        assert tensors[f"{module}.lora_embedding_A"].shape == (4, 64)
        assert tensors[f"{module}.lora_embedding_B"].shape == (80, 4)
    else:
        assert tensors[f"{module}.lora_A.weight"].shape == (4, 80)
        assert tensors[f"{module}.lora_B.weight"].shape == (64, 4)
    found: Any = load_adapter(folder, {name: normal(64, 80)})
    assert np.array_equal(found[name].update(), tree[name].update())


def test_layers_that_an_adapter_leaves_out(tmp_path: Path):
    """Only two layers of three, of different ranks: the others get no update."""
    two = {
        f"layers.{i}.attn.weight": LoraArray(normal(64, 80), normal(64, r), normal(r, 80), jnp.float32(2))
        for i, r in ((0, 4), (2, 2))
    }
    folder = save_adapter(tmp_path / "adapter", two)
    found: Any = load_adapter(folder, {"layers.attn.weight": normal(3, 64, 80)})["layers.attn.weight"]
    assert found.rank == 4
    for i in (0, 2):
        np.testing.assert_allclose(found.update()[i], two[f"layers.{i}.attn.weight"].update(), rtol=1e-5, atol=1e-5)
    assert not np.any(found.update()[1])
    twice = {f"layers.{i}.attn.weight": two["layers.0.attn.weight"] for i in ("0", "00")}
    with pytest.raises(CheckpointError, match="is the second update of"):
        load_adapter(save_adapter(tmp_path / "twice", twice), {"layers.attn.weight": normal(3, 64, 80)})
    with pytest.raises(CheckpointError, match=r"'layers\.2\.attn': the model has no such module"):
        load_adapter(folder, {"layers.attn.weight": normal(2, 64, 80)})


def test_adapters_are_switched_without_compiling_again(tmp_path: Path):
    base, x = drop_lora(stacked()), normal(5, 80)
    folders = [save_adapter(tmp_path / str(seed), stacked(seed)) for seed in (0, 7)]

    @jax.jit
    @implicit
    def run(tree: Any, x: jax.Array) -> jax.Array:
        embedding = tree["wte.embedding"]
        layer = lambda x, w: (jnp.tanh(x @ w.T @ embedding @ embedding.T @ w), None)  # noqa: E731
        return jax.lax.scan(layer, x, tree["layers.attn.weight"])[0]

    outs = [run(load_adapter(folder, base), x) for folder in folders]
    assert run._cache_size() == 1
    assert not np.array_equal(*outs)


def changed(folder: Path, **config: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return folder


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "its `peft_type` is 'IA3', not 'LORA'"),
        ({"use_dora": True}, "`use_dora` is 'True': it scales each row"),
        ({"bias": "lora_only"}, "`bias` is 'lora_only': it adds trained biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "it takes the first update off the base weights"),
        ({"sparsity": 0.5}, "`sparsity` is '0.5': it is an option that is not known here"),
        ({"use_rslora": "false"}, "`use_rslora` is 'false', and must be a bool"),
        ({"rank_pattern": [4]}, "and must be a dict"),
        ({"r": 5}, "its matrices have rank 4, and the configuration says 5"),
        ({"lora_alpha": None}, "has lora_alpha = 'None', which is no number"),
        ({"rank_pattern": {"(a+)+b": 3}}, "a regular expression; only names of modules are read"),
    ],
)
def test_a_configuration_that_is_wrong(tmp_path: Path, config: dict[str, Any], words: str):
    with pytest.raises(CheckpointError, match=words.replace("(", r"\(")):
        load_adapter(changed(as_theirs(save_adapter(tmp_path, adapted())), **config), model())


# All of PEFT 0.21, with a value that means something.
PEFT_OPTIONS = {
    "read": ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "peft_type"),
    "passed over": (
        *("target_modules", "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern", "task_type"),
        *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("velora_config", "qalora_group_size", "runtime_config", "auto_mapping", "peft_version", "inference_mode"),
        *("base_model_name_or_path", "revision"),
    ),
    "refused": (
        *("bias", "modules_to_save", "init_lora_weights", "trainable_token_indices", "use_dora", "use_qalora"),
        *("alora_invocation_tokens", "monteclora_config", "layer_replication", "lora_bias", "target_parameters"),
        *("use_bdlora", "arrow_config", "kasa_config", "ensure_weight_tying"),
    ),
}


def test_every_option_of_peft_is_known(tmp_path: Path):
    folder = as_theirs(save_adapter(tmp_path, adapted()))
    for option in PEFT_OPTIONS["passed over"]:
        load_adapter(changed(folder, **{option: ["x"]}), model())
    load_adapter(changed(folder, bias="none", init_lora_weights="gaussian", use_dora=False, loftq_config={}), model())
    for option in PEFT_OPTIONS["refused"]:
        with pytest.raises(CheckpointError, match=rf"`{option}` is .*: it .*, and is not read") as error:
            load_adapter(changed(folder, **{option: ["x"]}), model())
        assert "not known" not in str(error.value)
        changed(folder, **{option: None})


def test_weights_with_the_inputs_first(tmp_path: Path):
    """As GPT-2 has them; of a square matrix the shape does not tell."""
    a, b = normal(4, 64), normal(64, 4, seed=1)
    tensors: Any = {A: a, B: b}
    folder = adapter_of(tmp_path, **tensors)
    for fan_in_fan_out, expected in ((False, b @ a), (True, a.T @ b.T)):
        changed(folder, fan_in_fan_out=fan_in_fan_out)
        found: Any = load_adapter(folder, {"one": {"weight": jnp.zeros((64, 64))}})
        np.testing.assert_allclose(found["one"]["weight"].update(), 2 * expected, rtol=1e-4, atol=1e-4)


def as_theirs(folder: Path) -> Path:
    """The folder, with weights that do not say themselves what the configuration beside them has to say."""
    file = folder / "adapter_model.safetensors"
    file.write_bytes(safetensors_file({name: np.asarray(tensor) for name, tensor in load(file, flat=True).items()}))
    return folder


def adapter_of(folder: Path, r: int = 4, alpha: float = 8.0, **tensors: Any) -> Path:
    """An adapter with these tensors, by the names of the module "one"."""
    save(folder / "adapter_model.safetensors", {name.replace("__", "."): each for name, each in tensors.items()})
    config = {"peft_type": "LORA", "r": r, "lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


A, B = "one__lora_A__weight", "one__lora_B__weight"
PEFT = "base_model__model__"
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "no rank": ({"r": 0, A: normal(0, 80), B: normal(64, 0)}, "rank 0, and an update has at least 1"),
    "an infinite factor": ({"alpha": 1e300, A: normal(4, 80), B: normal(64, 4)}, "lora_alpha = 1e.300, and float32"),
    "complex": ({A: np.ones((4, 80), np.complex64), B: normal(64, 4)}, "must be floating point"),
    "integers": ({A: np.ones((4, 80), np.int32), B: normal(64, 4)}, "must be floating point"),
    "both prefixes": (
        {A: normal(4, 80), B: normal(64, 4), PEFT + A: normal(4, 80), PEFT + B: normal(64, 4)},
        "the module 'one' has another update",
    ),
    "halves of both": ({A: normal(4, 80), PEFT + B: normal(64, 4)}, "the module 'one' has another update"),
    "also an embedding": (
        {A: normal(4, 80), B: normal(64, 4), "one__lora_embedding_A": normal(4, 80)},
        "the module 'one' has another update",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_updates_that_are_none(name: str, tmp_path: Path):
    tensors, words = HOSTILE[name]
    with pytest.raises(CheckpointError, match=words):
        load_adapter(adapter_of(tmp_path, **tensors), model())


def test_an_adapter_for_another_model(tmp_path: Path):
    folder = save_adapter(tmp_path, adapted())
    with pytest.raises(CheckpointError, match="'one': the model has no such module"):
        load_adapter(folder, {"three": {"weight": normal(8, 8)}})
    with pytest.raises(CheckpointError, match=r"'one': \(4, 80\) and \(64, 4\) do not fit the weight \(8, 8\)"):
        load_adapter(folder, {"one": {"weight": normal(8, 8)}})


def test_other_errors(tmp_path: Path):
    with pytest.raises(ValueError, match="has no LoRA array"):
        save_adapter(tmp_path, model())
    stack = quantize_model({"kernel": normal(2, 64, 64)})
    with pytest.raises(ValueError, match="'kernel' is a stack of 2 matrices, and PEFT names each of them"):
        save_adapter(tmp_path, add_lora(stack, key=jax.random.key(0)))
    save(tmp_path / "adapter_model.safetensors", {"x": jnp.ones(3)})
    with pytest.raises(CheckpointError, match="there is no configuration of an adapter"):
        load_adapter(tmp_path, model())
