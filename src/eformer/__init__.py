"""Quantized arrays for JAX: same code, a fraction of the memory."""

__version__ = "0.1.0"
