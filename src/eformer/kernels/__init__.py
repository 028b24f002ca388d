"""Kernels of matmuls with quantized arrays: `eformer.kernels.cpu` says what the native core offers here."""
