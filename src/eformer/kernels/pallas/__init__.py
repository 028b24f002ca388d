"""Matmuls with quantized matrices on TPU and GPU, in Pallas."""

from ._choice import PLATFORMS as PLATFORMS
from ._choice import Device as Device
from ._choice import matmul as matmul
