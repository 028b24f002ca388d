"""Products with quantized matrices on TPU and GPU, in Pallas."""
