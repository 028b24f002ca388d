"""Models with random weights that everybody can make again, and `llm_golden.json`, their logits by `transformers`.

python -m venv hf && hf/bin/pip install torch transformers numpy && hf/bin/python tests/golden_llm.py
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).with_name("llm_golden.json")
TOKENS = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
GEMMA = {
    "num_hidden_layers": 6,
    "sliding_window": 5,
    "query_pre_attn_scalar": 8,
    "hidden_activation": "gelu_pytorch_tanh",
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": GEMMA,
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A random array that the name decides."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return random.normal(size=shape).astype(np.float32) / (8 if len(shape) == 1 else shape[-1] ** 0.5)


def _main() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    golden = {}
    for family, more in FAMILIES.items():
        config = AutoConfig.for_model(family, **{**SIZES, **more}, attn_implementation="eager")
        model = AutoModelForCausalLM.from_config(config).eval()
        state = model.state_dict()
        found, shapes = {}, {}
        for name, array in state.items():
            if name == "lm_head.weight":  # tied
                continue
            parts = _single(name, tuple(array.shape))
            made = [weight(part, shape) for part, shape in parts]
            shapes |= dict(parts)
            found[name] = torch.tensor(np.concatenate(made).reshape(array.shape))
        model.load_state_dict(found, strict=False)
        model.tie_weights()
        with torch.no_grad():
            logits = model(torch.tensor([TOKENS])).logits[0, -3:].double().numpy()
        golden[family] = {
            "config": json.loads(config.to_json_string()),
            "shapes": shapes,
            "logits": np.round(logits, 6).tolist(),
        }
    GOLDEN.write_text(json.dumps(golden) + "\n")


def _single(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays of a checkpoint that an array of transformers 5 is made of, which joins the experts of a layer."""
    if ".experts." not in name or len(shape) != 3:
        return [(name, shape)]
    stem, joined = name.rsplit(".", 1)
    names = ("gate_proj", "up_proj") if joined == "gate_up_proj" else ("down_proj",)
    return [
        (f"{stem}.{i}.{part}.weight", (shape[1] // len(names), shape[2])) for i in range(shape[0]) for part in names
    ]


if __name__ == "__main__":
    _main()
