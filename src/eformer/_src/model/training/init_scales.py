"""Scales of a whole model as parameters: learned step sizes (LSQ) for `fake_quantize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from eformer._src.model.paths import is_quantized, named_leaves
from eformer._src.model.quantize import asked_rules
from eformer._src.model.rules import Rule, named_errors, rule_for
from eformer._src.quantization.learned_scales import initial_scale
from eformer._src.quantization.spelling import FormatLike

Scales = Mapping[str, jax.Array]  # by path


def init_scales(
    tree: object,
    rules: FormatLike | Sequence[Rule] | None = None,
    *,
    format: FormatLike | None = None,
    **options: object,
) -> dict[str, jax.Array]:
    """The scale of each leaf that `rules` quantize, by path, as float32 parameters that start where rounding does.

    They are trained beside the weights (LSQ, arXiv 1902.08153), by the same optimizer, and given to `fake_quantize` and
    then to `finalize`. Formats whose values are an integer code times a scale have them: "int8", "ternary", and "int2"
    to "int8_grouped" with `symmetric=True` and without `double_quantization`. Where `rules` choose another format,
    leave those rules out here.

    >>> import jax.numpy as jnp
    >>> from eformer.model import init_scales
    >>> scales = init_scales({"kernel": jnp.ones((128, 64))}, "int4", symmetric=True)
    >>> {path: scale.shape for path, scale in scales.items()}
    {'kernel': (4, 64)}
    """
    given = asked_rules(rules, format, options, "int8")
    scales = {}
    for path, leaf in named_leaves(tree)[0]:
        rule = rule_for(given, path, leaf)
        if rule is None or rule.format is None:
            continue
        if is_quantized(leaf):
            raise TypeError(f"{path!r} is quantized already: scales are learned with dense weights (`dequantize`)")
        with named_errors(path, leaf, rule):
            scales[path] = initial_scale(leaf, rule.format, **rule.options_for(path, leaf))
    if not scales:
        raise ValueError("the rules quantize no leaf of the tree, so there is no scale to learn")
    return scales


def check_scales(scales: Scales | None, chosen: Mapping[str, Rule | None]) -> None:
    """Raise a ValueError unless each of the `scales` belongs to a leaf for which a rule was `chosen`."""
    for path in scales or ():
        rule = chosen.get(path)
        if rule is None or rule.format is None:
            known = ", ".join(repr(name) for name, rule in chosen.items() if rule and rule.format) or "none"
            raise ValueError(
                f"`scales` has {path!r}, which no rule quantizes here; quantized leaves are: {known[:300]}"
            )
