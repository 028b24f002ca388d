"""Whole models: rules choose the format of each leaf, and a report compares sizes and values before and after."""

from eformer._src.model.calibration.budget import Plan as Plan
from eformer._src.model.calibration.budget import plan_budget as plan_budget
from eformer._src.model.calibration.calibrate import calibrate as calibrate
from eformer._src.model.calibration.outputs import OutputErrors as OutputErrors
from eformer._src.model.calibration.outputs import compare_outputs as compare_outputs
from eformer._src.model.calibration.statistics import Statistic as Statistic
from eformer._src.model.calibration.statistics import Statistics as Statistics
from eformer._src.model.calibration.statistics import UncalibratedWarning as UncalibratedWarning
from eformer._src.model.calibration.tune import tune as tune
from eformer._src.model.defaults import default_rules as default_rules
from eformer._src.model.finite import Nonfinite as Nonfinite
from eformer._src.model.finite import check_finite as check_finite
from eformer._src.model.finite import find_nonfinite as find_nonfinite
from eformer._src.model.paths import named_leaves as named_leaves
from eformer._src.model.paths import stored_bytes as stored_bytes
from eformer._src.model.quantize import dequantize as dequantize
from eformer._src.model.quantize import quantize_model as quantize_model
from eformer._src.model.report.compare_models import report as report
from eformer._src.model.report.report import Leaf as Leaf
from eformer._src.model.report.report import Report as Report
from eformer._src.model.rules import NonfiniteWarning as NonfiniteWarning
from eformer._src.model.rules import Rule as Rule
from eformer._src.model.rules import UnusedRuleWarning as UnusedRuleWarning
from eformer._src.model.rules import parse_rule as parse_rule
from eformer._src.model.training.fake_quantize import fake_quantize as fake_quantize
from eformer._src.model.training.fake_quantize import finalize as finalize
from eformer._src.model.training.fake_quantized_array import FakeQuantizedArray as FakeQuantizedArray
from eformer._src.model.training.init_scales import init_scales as init_scales
from eformer._src.model.training.lora import add_lora as add_lora
from eformer._src.model.training.lora import drop_lora as drop_lora
from eformer._src.model.training.lora import lora_dropout as lora_dropout
from eformer._src.model.training.lora import merge_lora as merge_lora
from eformer._src.model.training.lora_array import LoraArray as LoraArray
from eformer._src.model.training.partition import combine as combine
from eformer._src.model.training.partition import partition as partition
from eformer._src.model.uses.rules_from_use import rules_from_use as rules_from_use
from eformer._src.public import name_publicly as _name_publicly

dequantize_model = dequantize  # an older name

_name_publicly(globals(), below="eformer.ops.quantization")
