"""Matmuls with quantized matrices on TPU and GPU, in Pallas."""

from .choice import PLATFORMS as PLATFORMS
from .choice import Device as Device
from .choice import matmul as matmul
