"""Quantized arrays: INT8, NF4, binary and ternary at two bits, RSR operators, and every other registered format."""

import importlib as _importlib
import pkgutil as _pkgutil

from . import _collectives as _collectives  # these register rules
from . import _gather as _gather
from . import _layout as _layout
from . import _movement as _movement
from . import _scaling as _scaling
from ._base import QuantizedArray as QuantizedArray
from ._config import QuantizationConfig as QuantizationConfig
from ._config import QuantizationType as QuantizationType
from ._config import quantize as quantize
from ._config import straight_through as straight_through
from ._gptq import gptq as gptq
from ._learned_scales import has_learned_scale as has_learned_scale
from ._learned_scales import initial_scale as initial_scale
from ._learned_scales import quantize_with_scale as quantize_with_scale
from ._learned_scales import straight_through_with_scale as straight_through_with_scale
from ._matmul import _convolution as _convolution
from ._matmul import _lowering as _lowering
from ._matmul import _ragged as _ragged
from ._matmul._fuse import fuse as fuse
from ._matmul._rule import is_kernel_available as is_kernel_available
from ._matmul._rule import nf4_use_kernel as nf4_use_kernel
from ._matmul._rule import use_kernels as use_kernels
from ._registry import Format as Format
from ._registry import array_types as array_types
from ._registry import find_format as find_format
from ._registry import format_names as format_names
from ._registry import formats as formats
from ._registry import register_array_type as register_array_type
from ._registry import register_format as register_format
from ._sharding import checked_sharding as checked_sharding
from ._spelling import FormatLike as FormatLike
from ._spelling import FormatName as FormatName
from ._spelling import FormatSpec as FormatSpec
from ._spelling import read_format as read_format
from ._stored import array_from_fields as array_from_fields
from ._stored import check_array as check_array
from ._stored import check_codes as check_codes
from ._stored import code_version as code_version
from ._stored import declares_leaves as declares_leaves
from ._stored import recode as recode
from ._trained import dense_with_scales as dense_with_scales
from ._trained import scales_of as scales_of
from ._trained import with_scales as with_scales
from .implicit_array_1bit import Array1B as Array1B
from .implicit_array_8bit import Array8B as Array8B
from .implicit_array_float8 import ArrayFloat8 as ArrayFloat8
from .implicit_array_grouped import ArrayGrouped as ArrayGrouped
from .implicit_array_nf4 import ArrayNF4 as ArrayNF4
from .implicit_array_permuted import ArrayPermuted as ArrayPermuted
from .implicit_array_rsr import RSROperatorBinary as RSROperatorBinary
from .implicit_array_rsr import RSROperatorTernary as RSROperatorTernary

from ._documented import straight_through_1bit as straight_through_1bit  # isort: skip  # after the formats it adds to
from ._documented import straight_through_8bit as straight_through_8bit  # isort: skip
from ._documented import straight_through_nf4 as straight_through_nf4  # isort: skip

for _module in _pkgutil.iter_modules(__path__):  # a format registers itself when its file is imported
    if _module.name.startswith("implicit_array_"):
        _importlib.import_module(f"{__name__}.{_module.name}")
