"""Rules that move quantized arrays or scale them, and leave them quantized."""

from . import collectives as collectives  # each registers its rules
from . import finer as finer
from . import gather as gather
from . import layout as layout
from . import movement as movement
from . import scaling as scaling
