"""The documented place of `Array8B`, and of functions that run a primitive on its arrays."""

from eformer._src.compat.documented import matmul_bf16_int8_weight_only as matmul_bf16_int8_weight_only
from eformer._src.compat.documented import straight_through_8bit as straight_through_8bit
from eformer._src.compat.handlers import handlers_of
from eformer._src.quantization.formats.int8 import Array8B as Array8B

globals().update(handlers_of("8bit", __name__))
