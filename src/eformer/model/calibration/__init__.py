"""Data choose the codes: what a function multiplies its weights by, and how weights are quantized for it."""

from ._calibrate import calibrate as calibrate
from ._statistics import Statistic as Statistic
from ._statistics import Statistics as Statistics
