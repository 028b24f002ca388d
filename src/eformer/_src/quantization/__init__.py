"""Quantized arrays: INT8, NF4, binary and ternary at two bits, and every other registered format."""

from . import formats as formats  # these register formats and rules
from . import rules as rules
from .matmul import convolution as convolution
from .matmul import lowering as lowering
from .matmul import ragged as ragged
