"""The native core: matmuls with quantized matrices, and their values, on CPU."""

from .buffers import moves as moves
from .buffers import separate as separate
from .buffers import texts as texts
from .call import Matmul as Matmul
from .call import SlowerWithoutCore as SlowerWithoutCore
from .call import decode as decode
from .call import formats as formats
from .call import instruction_set as instruction_set
from .call import instruction_sets as instruction_sets
from .call import is_available as is_available
from .call import loop_name as loop_name
from .call import matmul as matmul
from .call import matmuls as matmuls
from .call import segment_matmul as segment_matmul
from .call import supports as supports
from .call import use_core as use_core
from .call import why_not_rounded as why_not_rounded
