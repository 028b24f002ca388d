"""Quantized arrays for JAX: same code, a fraction of the memory.

`quantize_model` stores the weights of a model in 8, 4 or 2 bits. `implicit` lets the model's own code, unchanged, run
on them: a matmul reads the codes, and no dense copy of a weight is made.

>>> import jax, jax.numpy as jnp
>>> import eformer
>>> def model(params, x):  # any JAX code: Flax, Equinox, Haiku or plain functions
...     return jax.nn.relu(x @ params["up"]) @ params["down"]
>>> params = {"up": jnp.ones((256, 1024)), "down": jnp.ones((1024, 256))}
>>> small = eformer.quantize_model(params)  # 4 bits a weight; "int8", "int3", "nf4" and more by name
>>> small["up"]
ArrayGrouped(float32[256, 1024], 151,552 bytes)
>>> jax.jit(eformer.implicit(model))(small, jnp.ones((2, 256))).shape
(2, 256)

What to look at next:

one array       quantize, dequantize
a model         quantize_model, default_rules, rules_from_use, Rule, report, stored_bytes
run it          implicit, fuse
look inside     explain, materialization_error, use_kernels
files           load, save, convert, open_checkpoint, quantize_checkpoint
train it        partition, combine, straight_through, ste
look at data    calibrate, Statistics, tune
keys, values    eformer.cache: empty, quantize; caches of language models in 8 or 4 bits
formats         Array8B (int8), ArrayGrouped (int2, int3, int4, int5, int6, int8_grouped, mxfp4, nvfp4), ArrayNF4 (nf4),
                ArrayFloat8 (fp8, fp8_e5m2), Array1B (ternary, binary), RSROperatorBinary, RSROperatorTernary
add your own    ImplicitArray, aux_field, register; QuantizedArray, register_format, formats

`help(eformer.quantize_model)` explains one name, `eformer --help` the command line. Names live in `eformer.jaximus`
(implicit arrays), `eformer.ops.quantization` (formats), `eformer.model` (models) and `eformer.checkpoint` (files).
`import eformer` alone is quick: a name, and JAX with it, is imported when it is first used.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # for type checkers and editors; `_HOMES` has the same names
    from .checkpoint import Checkpoint as Checkpoint
    from .checkpoint import CheckpointError as CheckpointError
    from .checkpoint import convert as convert
    from .checkpoint import load as load
    from .checkpoint import open_checkpoint as open_checkpoint
    from .checkpoint import quantize_checkpoint as quantize_checkpoint
    from .checkpoint import save as save
    from .jaximus import ImplicitArray as ImplicitArray
    from .jaximus import aux_field as aux_field
    from .jaximus import explain as explain
    from .jaximus import implicit as implicit
    from .jaximus import materialization_error as materialization_error
    from .jaximus import materialize as materialize
    from .jaximus import register as register
    from .jaximus import ste as ste
    from .model import Report as Report
    from .model import Rule as Rule
    from .model import Statistics as Statistics
    from .model import calibrate as calibrate
    from .model import combine as combine
    from .model import default_rules as default_rules
    from .model import dequantize as dequantize
    from .model import partition as partition
    from .model import quantize_model as quantize_model
    from .model import report as report
    from .model import rules_from_use as rules_from_use
    from .model import stored_bytes as stored_bytes
    from .model import tune as tune
    from .ops.quantization import Array1B as Array1B
    from .ops.quantization import Array8B as Array8B
    from .ops.quantization import ArrayFloat8 as ArrayFloat8
    from .ops.quantization import ArrayGrouped as ArrayGrouped
    from .ops.quantization import ArrayNF4 as ArrayNF4
    from .ops.quantization import QuantizationConfig as QuantizationConfig
    from .ops.quantization import QuantizationType as QuantizationType
    from .ops.quantization import QuantizedArray as QuantizedArray
    from .ops.quantization import RSROperatorBinary as RSROperatorBinary
    from .ops.quantization import RSROperatorTernary as RSROperatorTernary
    from .ops.quantization import formats as formats
    from .ops.quantization import fuse as fuse
    from .ops.quantization import quantize as quantize
    from .ops.quantization import register_format as register_format
    from .ops.quantization import straight_through as straight_through
    from .ops.quantization import use_kernels as use_kernels

_HOMES = {
    "jaximus": "ImplicitArray aux_field explain implicit materialization_error materialize register ste",
    "ops.quantization": "Array1B Array8B ArrayFloat8 ArrayGrouped ArrayNF4 QuantizationConfig QuantizationType "
    "QuantizedArray RSROperatorBinary RSROperatorTernary formats fuse quantize register_format straight_through "
    "use_kernels",
    "model": "Report Rule Statistics calibrate combine default_rules dequantize partition "
    "quantize_model report rules_from_use stored_bytes tune",
    "checkpoint": "Checkpoint CheckpointError convert load open_checkpoint quantize_checkpoint save",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_PACKAGES = frozenset({"cache", "checkpoint", "cli", "jaximus", "kernels", "model", "ops"})


if not TYPE_CHECKING:  # so that type checkers report a name that is not there

    def __getattr__(name: str) -> object:
        import importlib

        if name in _PACKAGES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")  # Python suggests names of `__dir__`
        found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = found  # the next use of the name does not come here
        return found


def __dir__() -> list[str]:
    return sorted({*_HOME, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})
