"""The documented place of `ArrayNF4`, and of functions that run a primitive on its arrays."""

from eformer._src.compat.documented import safe_delete as safe_delete
from eformer._src.compat.documented import safe_materialize as safe_materialize
from eformer._src.compat.documented import straight_through_nf4 as straight_through_nf4
from eformer._src.compat.handlers import handlers_of
from eformer._src.quantization.formats.nf4 import ArrayNF4 as ArrayNF4

globals().update(handlers_of("nf4", __name__))
