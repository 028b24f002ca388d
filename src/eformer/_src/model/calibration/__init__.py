"""Data choose the codes: what a function multiplies its weights by, and how weights are quantized for it."""
