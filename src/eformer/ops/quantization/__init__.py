"""Quantized arrays: INT8, NF4, binary and ternary at two bits, and RSR operators."""

import importlib
import pkgutil

from . import _collectives as _collectives  # these register rules
from . import _layout as _layout
from . import _movement as _movement
from . import _scaling as _scaling
from ._base import Format as Format
from ._base import QuantizedArray as QuantizedArray
from ._base import array_types as array_types
from ._base import checked_sharding as checked_sharding
from ._base import find_format as find_format
from ._base import formats as formats
from ._base import register_array_type as register_array_type
from ._base import register_format as register_format
from ._config import QuantizationConfig as QuantizationConfig
from ._config import QuantizationType as QuantizationType
from ._config import quantize as quantize
from ._config import straight_through as straight_through
from ._matmul import _convolution as _convolution
from ._matmul import _lowering as _lowering
from ._matmul import _ragged as _ragged
from ._matmul._rule import is_kernel_available as is_kernel_available
from ._matmul._rule import nf4_use_kernel as nf4_use_kernel
from ._matmul._rule import use_kernels as use_kernels
from .implicit_array_1bit import Array1B as Array1B
from .implicit_array_1bit import straight_through_1bit as straight_through_1bit
from .implicit_array_8bit import Array8B as Array8B
from .implicit_array_8bit import straight_through_8bit as straight_through_8bit
from .implicit_array_nf4 import ArrayNF4 as ArrayNF4
from .implicit_array_nf4 import straight_through_nf4 as straight_through_nf4
from .implicit_array_rsr import RSROperatorBinary as RSROperatorBinary
from .implicit_array_rsr import RSROperatorTernary as RSROperatorTernary

for _module in pkgutil.iter_modules(__path__):  # a format registers itself when its file is imported
    if _module.name.startswith("implicit_array_"):
        importlib.import_module(f"{__name__}.{_module.name}")
