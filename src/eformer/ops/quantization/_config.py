"""The documented place of the configuration and of `quantize`."""

from eformer._src.quantization.config import QuantizationConfig as QuantizationConfig
from eformer._src.quantization.config import QuantizationType as QuantizationType
from eformer._src.quantization.config import quantize as quantize
from eformer._src.quantization.config import straight_through as straight_through
