"""Whole models: rules choose the format of each leaf, and a report compares sizes and values before and after."""

from ._compare_models import report as report
from ._defaults import contracted_axis as contracted_axis
from ._defaults import default_rules as default_rules
from ._from_use import rules_from_use as rules_from_use
from ._partition import combine as combine
from ._partition import partition as partition
from ._paths import named_leaves as named_leaves
from ._paths import stored_bytes as stored_bytes
from ._quantize import dequantize as dequantize
from ._quantize import dequantize_model as dequantize_model
from ._quantize import quantize_model as quantize_model
from ._report import Leaf as Leaf
from ._report import Report as Report
from ._rules import Rule as Rule
from ._rules import UnusedRuleWarning as UnusedRuleWarning
from ._rules import apply_rule as apply_rule
from ._rules import find_rule as find_rule
from ._rules import parse_rule as parse_rule
from ._rules import warn_unused_rules as warn_unused_rules
from ._table import SORTS as SORTS
