"""Training with quantized weights: which leaves are trained, fake quantization, LoRA."""
