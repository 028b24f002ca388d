"""Which weights take which format, by name: the only file of this example that knows quantized arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eformer import QuantizedArray, materialize
from eformer._src.model.rules import apply_rule, find_rule
from eformer.model import default_rules
from eformer.ops.quantization import FormatSpec

AS_IN_FILE, DENSE = "file", "float32"


def quantizing(form: str, *, embeddings: str = "int8", activations: str = "float") -> Callable[[str, Any], Any]:
    """The `change` for `load_model` that puts weights into the format `form`: "file", "float32", "int4,fit=false".

    Embeddings, often the output layer too, take the format `embeddings`: they lose most by four bits.
    """
    rules = ()
    if form not in (AS_IN_FILE, DENSE):
        rules = default_rules(FormatSpec(form), embeddings=FormatSpec(embeddings))

    def change(name: str, array: Any) -> Any:
        rule = find_rule(rules, name, array)
        if form == DENSE or (rule is not None and rule.format is not None):
            array = apply_rule(rule, name, materialize(array))
        int8 = activations == "int8" and isinstance(array, QuantizedArray)
        return array.with_activation_dtype("int8") if int8 else array

    return change
