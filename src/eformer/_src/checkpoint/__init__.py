"""Checkpoints of dense and quantized arrays: safetensors, also as bitsandbytes writes it, and GGUF."""

from . import layouts as layouts  # the layouts of other projects, which register themselves
