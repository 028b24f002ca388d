"""Products with quantized matrices on TPU and GPU, in Pallas."""

from ._call import PLATFORMS as PLATFORMS
from ._call import Device as Device
from ._call import matmul as matmul
