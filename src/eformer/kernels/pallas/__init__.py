"""Matmuls with quantized matrices on TPU and GPU, in Pallas."""

from eformer._src.kernels.pallas import PLATFORMS as PLATFORMS
from eformer._src.kernels.pallas import Device as Device
from eformer._src.kernels.pallas import matmul as matmul
from eformer._src.public import name_publicly as _name_publicly

_name_publicly(globals())
