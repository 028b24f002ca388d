"""The native core, which multiplies with quantized matrices on CPU: whether it is there, and what it can run here."""

from eformer._src.kernels.cpu import SlowerWithoutCore as SlowerWithoutCore
from eformer._src.kernels.cpu import formats as formats
from eformer._src.kernels.cpu import instruction_set as instruction_set
from eformer._src.kernels.cpu import instruction_sets as instruction_sets
from eformer._src.kernels.cpu import is_available as is_available
from eformer._src.kernels.cpu import use_core as use_core
from eformer._src.public import name_publicly as _name_publicly

_name_publicly(globals())
