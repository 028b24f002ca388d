"""The documented place of the configuration and of `quantize`."""

from eformer._src.compat.quantize import QuantizationConfig as QuantizationConfig
from eformer._src.compat.quantize import QuantizationType as QuantizationType
from eformer._src.compat.quantize import quantize as quantize
from eformer._src.compat.quantize import straight_through as straight_through
