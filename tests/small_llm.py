"""A small language model with the names, metadata and tokenizer of a real one, as GGUF and as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from eformer.examples.llm.tokenizer import CUTS

from eformer.checkpoint import save, save_gguf

WIDTH, HIDDEN, HEADS, KV_HEADS = 64, 96, 4, 2
LETTERS = [chr(code) for code in range(33, 127)]
TOKENS = [*LETTERS, "Ġ", "Ċ", "he", "Ġt", "Ġthe", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "Ġ t", "Ġt he"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in TOKENS],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
    "tokenizer.chat_template": TEMPLATE,
}
SHAPES = {
    "attn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH // 2, WIDTH),
    "attn_v": (WIDTH // 2, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_norm": (WIDTH,),
    "ffn_gate": (HIDDEN, WIDTH),
    "ffn_up": (HIDDEN, WIDTH),
    "ffn_down": (WIDTH, HIDDEN),
}
FOLDER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def hugging_face_tokenizer() -> Any:
    """The tokenizer of `TOKENIZER`, of the package that Hugging Face folders are for."""
    import tokenizers

    vocabulary, split = {token: i for i, token in enumerate(TOKENS)}, tokenizers.pre_tokenizers
    pairs = [tuple(merge.split(" ", 1)) for merge in MERGES]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    parts = [split.Split(tokenizers.Regex(cut), "isolated") for cut in CUTS[TOKENIZER["tokenizer.ggml.pre"]]]
    made.pre_tokenizer = split.Sequence([*parts, split.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token in TOKENS if token.startswith("<|")]
    made.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    return made


def random_weights(family: str, layers: int = 2) -> dict[str, np.ndarray]:
    """Of a model with few layers; Qwen2 with biases, Llama with an output layer."""
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(layers) for name, shape in SHAPES.items()}
    shapes |= {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    if family == "llama":
        shapes["output.weight"] = (len(TOKENS), WIDTH)
    else:
        parts = {"attn_q": WIDTH, "attn_k": WIDTH // 2, "attn_v": WIDTH // 2}
        shapes |= {f"blk.{i}.{name}.bias": (size,) for i in range(layers) for name, size in parts.items()}
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}


def write_gguf(path: Path, family: str, type: str = "Q8_0", layers: int = 2, **more: Any) -> Path:
    sizes = {
        "block_count": layers,
        "embedding_length": WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **more,
    }
    metadata = {"general.architecture": family} | {f"{family}.{name}": value for name, value in sizes.items()}
    return save_gguf(path, random_weights(family, layers), type=type, metadata=metadata | TOKENIZER)


def write_folder(folder: Path, family: str) -> Path:
    """The model of `write_gguf` under the names of Hugging Face, where heads of Llama have another order."""
    tree = {}
    for name, array in random_weights(family).items():
        *layer, own, end = name.split(".")
        if family == "llama" and own in ("attn_q", "attn_k"):
            heads = HEADS if own == "attn_q" else KV_HEADS
            array = array.reshape(heads, -1, 2, WIDTH).swapaxes(1, 2).reshape(array.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        tree[f"{prefix}{FOLDER_NAMES[own]}.{end}"] = array
    save(folder, tree)
    config = {
        "model_type": family,
        "num_hidden_layers": 2,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    hugging_face_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
