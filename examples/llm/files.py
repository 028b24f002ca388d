"""A model from a GGUF file or a Hugging Face folder, quantized on the way, one array at a time."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eformer import implicit
from eformer.checkpoint import Checkpoint, open_checkpoint

from .model import Config
from .rope import Rope, rope_of
from .tokenizer import Tokenizer, read_json

# The families that `model.py` runs, by the names of GGUF, and whether heads there have neighbours turned by RoPE.
NEIGHBOURS = {"llama": True, "qwen2": False, "qwen3": False, "qwen3moe": False, "gemma3": False}
FOLDERS = "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"  # by the names of Hugging Face
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",  # of a mixture of experts
    "block_sparse_moe.gate": "ffn_gate_inp",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
PATTERN = 6  # in Gemma 3, every sixth layer attends to all tokens
LARGEST_GEMMA = 62  # layers of the model whose queries are divided by another number
WINDOW_BASE = 10000.0  # of RoPE in the others
READERS = 2  # arrays that are read at the same time: most of it is memory that the system has to clear
REST = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Model(NamedTuple):
    params: dict[str, Any]
    config: Config
    tokenizer: Callable[[], Tokenizer]  # made when it is needed: it takes longer than small models to load


Change = Callable[[str, Any], Any]  # from the name of an array and the array to the one that takes its place
Progress = Callable[[str, int, int], object]


class ModelFile:
    """An open GGUF file or Hugging Face folder: `config` and `tokenizer` are there before the weights are read."""

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        metadata = checkpoint.metadata
        if "general.architecture" in metadata:  # GGUF, or safetensors that were made of it
            self.config, self.names = read_config(metadata), {name: name for name in checkpoint}
            _check_names(self.names)
            self._adds_one = False
            self.tokenizer = functools.partial(Tokenizer.from_gguf, metadata)
        else:
            folder = path if path.is_dir() else path.parent
            given = read_json(folder / "config.json")
            self._adds_one = given.get("model_type") == "gemma3_text"  # norms there are what is added to 1
            self.config, self.names = folder_config(given), _gguf_names(checkpoint, GEMMA if self._adds_one else {})
            self.tokenizer = functools.partial(Tokenizer.from_folder, folder)

    def read(self, change: Change | None = None, progress: Progress | None = None) -> dict[str, Any]:
        """The parameters; see `load_model`."""
        checkpoint, done, params = self._checkpoint, 0, {}
        total = sum(checkpoint.info(name).nbytes for name in self.names)
        for (name, own), array in zip(self.names.items(), _read_ahead(checkpoint.read, self.names), strict=True):
            params[own] = self._changed(own, array, change)
            done += checkpoint.info(name).nbytes
            if progress is not None:
                progress(name, done, total)
        return _with_stacks(params)

    def like(self, change: Change | None = None) -> dict[str, Any]:
        """The parameters that `read` will give, without values: JAX compiles a function of them meanwhile."""
        likes = {own: self._checkpoint.entry(name).like for name, own in self.names.items()}

        def params(arrays: Mapping[str, Any]) -> dict[str, Any]:
            return _with_stacks({own: self._changed(own, array, change) for own, array in arrays.items()})

        return jax.eval_shape(params, likes)

    def _changed(self, name: str, array: Any, change: Change | None) -> Any:
        array = array if array.dtype == jnp.float32 else array.astype(jnp.float32)
        if self._adds_one and "norm" in name:
            array = array + 1
        return array if change is None else change(name, array)


@contextlib.contextmanager
def open_model(path: str | Path) -> Iterator[ModelFile]:
    """The model in a GGUF file or a Hugging Face folder; only headers are read."""
    with open_checkpoint(path) as checkpoint:
        yield ModelFile(Path(path), checkpoint)


def load_model(path: str | Path, change: Change | None = None, progress: Progress | None = None) -> Model:
    """The model in a GGUF file or a Hugging Face folder; arrays that are quantized there stay so.

    `change(name, array)` may put another array in the place of each. Dense arrays become float32.
    """
    with open_model(path) as opened:
        return Model(opened.read(change, progress), opened.config, opened.tokenizer)


def _with_stacks(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with the experts of a layer as one array; a folder has an array for each of them."""
    names: dict[str, list[str]] = {}
    for name in params:
        if found := re.fullmatch(r"(.+_exps)\.\d+\.weight", name):
            names.setdefault(f"{found[1]}.weight", []).append(name)
    for stack, parts in names.items():
        parts.sort(key=lambda name: int(name.split(".")[-2]))
        params[stack] = implicit(jnp.stack)([params.pop(name) for name in parts])
    return params


def _read_ahead(read: Callable[[str], Any], names: Iterable[str], count: int = READERS) -> Iterator[Any]:
    """What `read` gives for each name, in order; threads read the next ones meanwhile."""
    with ThreadPoolExecutor(count) as readers:
        waiting: deque[Future[Any]] = deque()
        for name in names:
            waiting.append(readers.submit(read, name))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def read_config(metadata: Mapping[str, Any]) -> Config:
    """The configuration in the metadata of a GGUF file; a ValueError for a model that this code does not run."""
    family = metadata.get("general.architecture")
    if family not in NEIGHBOURS:
        raise ValueError(f"the model is of the family {family!r}; this code runs {', '.join(NEIGHBOURS)}")
    given = {name.removeprefix(f"{family}."): value for name, value in metadata.items()}
    heads, width = given["attention.head_count"], given["embedding_length"]
    size = given.get("attention.key_length", width // heads)
    if given.get("rope.dimension_count", size) != size or given.get("expert_shared_count"):
        raise ValueError("this code runs models without shared experts, with RoPE over whole heads")
    layers = given["block_count"]
    more: dict[str, Any] = {"experts": given.get("expert_used_count", 0)}
    if family == "gemma3":
        base = given.get("rope.freq_base_swa", WINDOW_BASE)
        more |= _gemma(layers, width, given["attention.sliding_window"], base)
        if layers == LARGEST_GEMMA:
            more["query_size"] = width / heads
    return Config(
        layers=layers,
        heads=heads,
        kv_heads=given.get("attention.head_count_kv", heads),
        head_size=size,
        epsilon=given["attention.layer_norm_rms_epsilon"],
        rope=_gguf_rope(given),
        rope_neighbours=NEIGHBOURS[family],
        context=given.get("context_length"),
        **more,
    )


def _gemma(layers: int, width: int, window: int, base: float) -> dict[str, Any]:
    """What Gemma 3 does in another way than the other families."""
    return {
        "window": window,
        "windowed": tuple(i % PATTERN != PATTERN - 1 for i in range(layers)),
        "window_rope": Rope(base=base),
        "embedding_scale": width**0.5,
        "gelu": True,
    }


def _gguf_rope(given: Mapping[str, Any]) -> Rope:
    """Of the kind "llama3" is the array `rope_freqs`."""
    said = {name.removeprefix("rope.scaling."): given[name] for name in given if name.startswith("rope.scaling.")}
    kind, base = said.get("type", "none"), given.get("rope.freq_base", 10000.0)
    known = {"type", "factor", "original_context_length", "finetuned"}
    if kind not in ("none", "linear", "yarn") or (kind != "none" and said.keys() - known):
        raise ValueError(
            f"the model has RoPE of the kind {kind!r} with {', '.join(said)}, which this code does not run"
        )
    more = {"original_max_position_embeddings": said.get("original_context_length"), "factor": said.get("factor")}
    return rope_of({"rope_type": "default" if kind == "none" else kind, **more}, base, given.get("context_length"))


def folder_config(given: Mapping[str, Any]) -> Config:
    """The same from the config.json of a Hugging Face folder."""
    family = given.get("model_type")
    if family not in FOLDERS:
        raise ValueError(f"the model is of the family {family!r}; this code runs {', '.join(FOLDERS)}")
    layers, heads = given["num_hidden_layers"], given["num_attention_heads"]
    context = given.get("max_position_embeddings")
    is_gemma = family == "gemma3_text"
    activation = given.get(
        "hidden_activation" if is_gemma else "hidden_act", "gelu_pytorch_tanh" if is_gemma else "silu"
    )
    others = [given.get(name) for name in ("final_logit_softcapping", "attn_logit_softcapping", "mlp_only_layers")]
    if (
        activation != ("gelu_pytorch_tanh" if is_gemma else "silu")
        or any(others)
        or given.get("decoder_sparse_step", 1) != 1
    ):
        raise ValueError(f"this code runs models of the family {family!r} with their usual activation and layers alone")
    more: dict[str, Any] = {"experts": given.get("num_experts_per_tok", 0)}
    more["shares_sum"] = family != "qwen3_moe" or bool(given.get("norm_topk_prob"))
    rope = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    local = {}
    if is_gemma:
        local, rope = rope.get("sliding_attention") or {}, rope.get("full_attention") or rope
    base = rope.get("rope_theta", given.get("rope_theta", 10000.0))
    if is_gemma:
        own = local.get("rope_theta", given.get("rope_local_base_freq", WINDOW_BASE))
        more |= _gemma(layers, given["hidden_size"], given["sliding_window"], own)
        more["query_size"] = given["query_pre_attn_scalar"]
    elif family in ("mistral", "mixtral") or given.get("use_sliding_window"):
        more |= {"window": given.get("sliding_window") or 0, "windowed": (bool(given.get("sliding_window")),) * layers}
        first = given.get("max_window_layers", 0)
        if family.startswith("qwen") and first:
            more["windowed"] = tuple(i >= first for i in range(layers))
    if given.get("use_sliding_window") and not family.startswith("qwen"):
        raise ValueError(f"`use_sliding_window` is not known for the family {family!r}: attention to all tokens")
    if given.get("layer_types") and more.get("window"):
        more["windowed"] = tuple(each == "sliding_attention" for each in given["layer_types"])
    return Config(
        layers=layers,
        heads=heads,
        kv_heads=given.get("num_key_value_heads", heads),
        head_size=given.get("head_dim") or given["hidden_size"] // heads,
        epsilon=given["rms_norm_eps"],
        rope=rope_of(rope, base, given.get("original_max_position_embeddings", context)),
        rope_neighbours=False,
        context=context,
        **more,
    )


def _check_names(names: Iterable[str]) -> None:
    """Raise a ValueError for an array of a GGUF file that `model.py` would not use."""
    own = {*LAYER.values(), *GEMMA.values(), *(f"ffn_{part}_exps" for part in EXPERTS.values())}
    parts = [*(rf"blk\.\d+\.{part}" for part in own), *REST.values()]
    known = re.compile(rf"({'|'.join(parts)})\.(weight|bias)|rope_freqs\.weight")
    other = next((name for name in names if not known.fullmatch(name)), None)
    if other is not None:
        raise ValueError(f"the array {other!r} has no place in this model")


def _gguf_names(names: Iterable[str], more: Mapping[str, str]) -> dict[str, str]:
    """The arrays of a Hugging Face checkpoint, and what GGUF calls them; `more` are names of parts of layers."""
    known, found = {**LAYER, **more}, {}
    for name in names:
        part, _, end = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", part)
        own = REST.get(part) if layer is None else known.get(layer[2])
        if layer is not None and (expert := EXPERT.fullmatch(layer[2])) and expert[2] in EXPERTS:
            own = f"ffn_{EXPERTS[expert[2]]}_exps.{expert[1]}"
        if own is None:
            raise ValueError(f"the array {name!r} has no place in this model")
        found[name] = f"{own}.{end}" if layer is None else f"blk.{layer[1]}.{own}.{end}"
    return found
