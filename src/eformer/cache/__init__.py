"""Caches of keys and values in 8 or 4 bits, for models that know nothing of them."""

from eformer._src.cache.make import empty as empty
from eformer._src.cache.make import quantize as quantize
from eformer._src.cache.quantized_cache import QuantizedCache as QuantizedCache
from eformer._src.public import name_publicly as _name_publicly

_name_publicly(globals(), below="eformer.ops.quantization")
