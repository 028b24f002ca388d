"""Quantized arrays: INT8, NF4, binary and ternary at two bits, RSR operators, and every other registered format."""

from eformer._src.compat.documented import straight_through_1bit as straight_through_1bit
from eformer._src.compat.documented import straight_through_8bit as straight_through_8bit
from eformer._src.compat.documented import straight_through_nf4 as straight_through_nf4
from eformer._src.compat.quantize import QuantizationConfig as QuantizationConfig
from eformer._src.compat.quantize import QuantizationType as QuantizationType
from eformer._src.compat.quantize import quantize as quantize
from eformer._src.compat.quantize import straight_through as straight_through
from eformer._src.compat.rsr import RSROperatorBinary as RSROperatorBinary
from eformer._src.compat.rsr import RSROperatorTernary as RSROperatorTernary
from eformer._src.public import name_publicly as _name_publicly
from eformer._src.quantization.base import QuantizedArray as QuantizedArray
from eformer._src.quantization.formats.float8 import ArrayFloat8 as ArrayFloat8
from eformer._src.quantization.formats.grouped import ArrayGrouped as ArrayGrouped
from eformer._src.quantization.formats.int8 import Array8B as Array8B
from eformer._src.quantization.formats.nf4 import ArrayNF4 as ArrayNF4
from eformer._src.quantization.formats.permuted import ArrayPermuted as ArrayPermuted
from eformer._src.quantization.formats.ternary import Array1B as Array1B
from eformer._src.quantization.matmul.dot_general import is_kernel_available as is_kernel_available
from eformer._src.quantization.matmul.dot_general import use_kernels as use_kernels
from eformer._src.quantization.matmul.fuse import fuse as fuse
from eformer._src.quantization.registry import Format as Format
from eformer._src.quantization.registry import find_format as find_format
from eformer._src.quantization.registry import format_names as format_names
from eformer._src.quantization.registry import formats as formats
from eformer._src.quantization.registry import register_format as register_format
from eformer._src.quantization.spelling import FormatLike as FormatLike
from eformer._src.quantization.spelling import FormatName as FormatName
from eformer._src.quantization.spelling import FormatSpec as FormatSpec

nf4_use_kernel = use_kernels  # the documented name, of a time when only NF4 had kernels

_name_publicly(globals(), below="eformer.jaximus")
