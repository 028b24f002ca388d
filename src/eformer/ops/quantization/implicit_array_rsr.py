"""The documented place of the RSR operators."""

from eformer._src.compat.rsr import RSROperatorBinary as RSROperatorBinary
from eformer._src.compat.rsr import RSROperatorTernary as RSROperatorTernary
