"""Data choose the codes: what a function multiplies its weights by, and how weights are quantized for it."""

from ._budget import Plan as Plan
from ._budget import plan_budget as plan_budget
from ._calibrate import calibrate as calibrate
from ._outputs import OutputErrors as OutputErrors
from ._outputs import compare_outputs as compare_outputs
from ._statistics import Statistic as Statistic
from ._statistics import Statistics as Statistics
from ._statistics import UncalibratedWarning as UncalibratedWarning
from ._tune import tune as tune
