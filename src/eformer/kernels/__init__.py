"""Functions of arrays: what every format stores and how it is read. Knows nothing of implicit arrays."""

from eformer._src.kernels import grouped as grouped
from eformer._src.kernels import reference as reference
from eformer._src.kernels.matrix import Matrix as Matrix
from eformer._src.public import name_publicly as _name_publicly

_name_publicly(globals())
