"""The native core: matmuls with quantized matrices, and their values, on CPU."""

from ._buffers import moves as moves
from ._buffers import separate as separate
from ._buffers import texts as texts
from ._call import Matmul as Matmul
from ._call import SlowerWithoutCore as SlowerWithoutCore
from ._call import decode as decode
from ._call import formats as formats
from ._call import instruction_set as instruction_set
from ._call import instruction_sets as instruction_sets
from ._call import is_available as is_available
from ._call import loop_name as loop_name
from ._call import matmul as matmul
from ._call import matmuls as matmuls
from ._call import segment_matmul as segment_matmul
from ._call import supports as supports
from ._call import use_core as use_core
