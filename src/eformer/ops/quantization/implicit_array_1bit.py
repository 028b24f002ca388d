"""The documented place of `Array1B`, and of functions that run a primitive on its arrays."""

from eformer._src.compat.documented import straight_through_1bit as straight_through_1bit
from eformer._src.compat.handlers import handlers_of
from eformer._src.quantization.formats.ternary import Array1B as Array1B

globals().update(handlers_of("1bit", __name__))
