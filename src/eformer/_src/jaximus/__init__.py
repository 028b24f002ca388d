"""Implicit arrays stand for a dense array without holding it; any JAX function runs on them, by rules per primitive."""

from . import control_flow as control_flow  # these register rules
from . import identity as identity
