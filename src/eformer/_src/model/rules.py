"""Rules: which leaf of a model takes which format."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from eformer._src.quantization.gptq import gptq
from eformer._src.quantization.registry import find_format, is_format_name
from eformer._src.quantization.spelling import FormatLike, read_format
from eformer._src.user_warnings import warn

from .axes import default_axis
from .finite import find_nonfinite
from .paths import Typed, is_weight

if TYPE_CHECKING:
    from eformer._src.model.calibration.statistics import Statistic

KEEP = "keep"  # how the command line writes `format=None`

METHODS = (None, "gptq")  # how codes are chosen: each for itself, or so that errors make up for each other

# The pattern is as short as can be, so that it may hold "=" and "," of its own: "(?=attn).*=nf4,axis=-2".
_RULE = re.compile(r"(?P<pattern>.+?)=(?P<format>[A-Za-z]\w*(,[A-Za-z]\w*=(\([^()]*\)|[^,()=]+))*)")


class Options(Mapping[str, Any]):
    """A mapping from names to hashable values that can itself be hashed; lists become tuples."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        given = (options or {}).items()
        self._items = {name: tuple(value) if isinstance(value, list) else value for name, value in given}
        for name, value in self._items.items():
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"the option `{name}` must be hashable, so that rules can be compared; got {type(value).__name__} "
                    f"{value!r}"
                ) from None

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True, init=False)
class Rule:
    """Leaves that match `pattern` take `format`, quantized with its options; the format None keeps them as they are.

    A string is a regular expression, searched for in the leaf's path, such as "layers.0.mlp.kernel". A function is
    called with path and leaf, which has `shape` and `dtype` and perhaps no values. Unknown formats and options raise
    here. If a rule matches nothing, `quantize_model` warns, unless it is `optional`. A `report` shows the `reason`.

    Options may stand in the text of the format, in a dict after it, or as arguments. `method="gptq"` is one of them
    for every format: codes are then chosen by GPTQ from the `statistics` of the leaf. A format with the option `axis`
    gets the contracted axis, as from `default_rules`, if none is given.

    >>> from eformer import Rule
    >>> str(Rule(r"mlp.*kernel$", "nf4", axis=-2, block_size=32))
    'mlp.*kernel$=nf4,axis=-2,block_size=32'
    >>> Rule("lm_head", "int8,axis=-2") == Rule("lm_head", "int8", {"axis": -2}) == Rule("lm_head", "INT8", axis=-2)
    True
    """

    pattern: str | Callable[[str, Any], bool]  # Any: leaves of users' own types, too
    format: str | None
    options: Mapping[str, Any] = Options()
    optional: bool = field(default=False, kw_only=True, repr=False)
    reason: str = field(default="", kw_only=True, repr=False, compare=False)
    method: str | None = field(default=None, kw_only=True, repr=False)

    def __init__(
        self,
        pattern: str | Callable[[str, Any], bool],
        format: FormatLike | Literal["keep"] | None,
        options: Mapping[str, Any] | None = None,
        *,
        optional: bool = False,
        reason: str = "",
        method: str | None = None,
        **more: object,
    ) -> None:
        if isinstance(pattern, str):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from None
        elif not callable(pattern):
            raise TypeError(f"`pattern` must be a str or a function of path and leaf, got {pattern!r}")
        if isinstance(format, str) and is_format_name(pattern) and not is_format_name(format):
            raise ValueError(f"a rule says first which leaves, then which format: `Rule({format!r}, {pattern!r})`")
        name, given = None, dict(options or {})
        if given.keys() & more.keys():
            raise TypeError(f"`{min(given.keys() & more.keys())}` is given twice, in `options` and as an argument")
        given |= more
        chosen: Any = given.pop("method", method)
        if format is None or format == KEEP:
            if given:
                raise TypeError(
                    f"a rule that keeps leaves as they are has no options, got {', '.join(map(repr, given))}"
                )
        else:
            form, given = read_format(format, given, also=("method",))
            name, chosen = form.name, given.pop("method", chosen)
        if chosen not in METHODS:
            raise ValueError(f"`method={chosen!r}` must be one of {', '.join(map(repr, METHODS))}")
        fields = {"pattern": pattern, "format": name, "options": Options(given)}
        vars(self).update(fields, optional=optional, reason=reason, method=chosen)

    def matches(self, path: str, leaf: Typed) -> bool:
        if isinstance(self.pattern, str):
            return re.search(self.pattern, path) is not None
        return bool(self.pattern(path, leaf))

    def options_for(self, path: str, leaf: Typed) -> dict[str, Any]:
        """The options that quantize a leaf: those of the rule, and an axis."""
        has_axis = self.format is not None and len(leaf.shape) > 1 and "axis" in find_format(self.format).options
        return {**({"axis": default_axis(path, leaf.shape)} if has_axis else {}), **self.options}

    def __str__(self) -> str:
        """The text that `parse_rule` reads, if the pattern is a string."""
        pattern = self.pattern if isinstance(self.pattern, str) else repr(self.pattern)
        # Tuples have no spaces, so that a shell takes them without quotes.
        named = {**self.options, **({"method": self.method} if self.method else {})}
        values = (f"{name}={str(value).replace(' ', '')}" for name, value in named.items())
        return f"{pattern}={','.join([self.format or KEEP, *values])}"


def parse_rule(text: str) -> Rule:
    """The rule of the text `PATTERN=FORMAT,option=value,...`, as on a command line.

    FORMAT is the name of a format, or "keep". A value is a number, true, false, none, a tuple in parentheses, or else
    text.

    >>> from eformer.model import parse_rule
    >>> parse_rule("attn|mlp=nf4,block_size=32,double_quantization=true")
    Rule(pattern='attn|mlp', format='nf4', options={'block_size': 32, 'double_quantization': True})
    >>> parse_rule("lm_head=keep")
    Rule(pattern='lm_head', format=None, options={})
    """
    found = _RULE.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{text!r} is no rule: write PATTERN=FORMAT,option=value,... such as 'mlp.*kernel=nf4,axis=-2', or "
            f"'lm_head=keep'"
        )
    if found["format"] == KEEP:
        return Rule(found["pattern"], None)
    form, options = read_format(found["format"], also=("method",))
    return Rule(found["pattern"], form, options)


def find_rule(rules: Sequence[Rule], path: str, leaf: Typed) -> Rule | None:
    """The first rule that matches."""
    return next((rule for rule in rules if rule.matches(path, leaf)), None)


def rule_for(rules: Sequence[Rule], path: str, leaf: object) -> Rule | None:
    """The first rule that matches a weight; None for all other leaves, such as integers, which must stay exact."""
    return find_rule(rules, path, leaf) if is_weight(leaf) else None


def apply_rule(rule: Rule | None, path: str, array: Any, statistic: Statistic | None = None) -> Any:
    """`array` in the rule's format; without values if it has none. An error names the leaf, the rule and the reason.

    With a `statistic` of what the array is multiplied by, errors count as much as they change products.
    """
    if rule is None or rule.format is None:
        return array
    form = find_format(rule.format)
    encode = functools.partial(form.encode, **rule.options_for(path, array))
    with named_errors(path, array, rule):
        if not isinstance(array, jax.ShapeDtypeStruct):
            _warn_nonfinite(path, array)
            weighed = {} if statistic is None or not form.takes_importance else {"importance": statistic.mean_square}
            made = encode(array, **weighed)
            return made if rule.method is None else with_gptq(made, array, statistic)
        made = jax.eval_shape(encode, jax.ShapeDtypeStruct(array.shape, array.dtype))
        return made.with_sharding(array.sharding) if isinstance(array.sharding, NamedSharding) else made


def with_gptq(made: Any, array: Any, statistic: Statistic | None) -> Any:
    """`made` from `array`, with codes by GPTQ."""
    axes = () if statistic is None else statistic.axes_with_moment(getattr(made, "axis", None))
    if statistic is None or not axes:
        why = "it has no statistics" if statistic is None else "it has no second moment"
        raise ValueError(
            f'`method="gptq"` needs `calibrate(function, second_moments=True)(...)` as `statistics`: {why}'
        )
    moment = statistic.second_moment(axes)
    assert moment is not None
    return gptq(made, array, moment, axes)


class NonfiniteWarning(UserWarning):
    """A weight that is quantized holds NaN or infinity: what shares a scale with it becomes NaN."""


def _warn_nonfinite(path: str, array: Any) -> None:
    found = {} if isinstance(array, Tracer) else find_nonfinite({path: array})
    warn_nonfinite(path, *found.get(path, (0, 0)))


def warn_nonfinite(path: str, nan: int, infinite: int) -> None:
    """Warn that a quantized array had NaN or infinite elements, given how many."""
    if nan or infinite:
        what = f"{path!r} holds {nan:,} NaN and {infinite:,} infinite elements"
        warn(f"{what}: quantized, the whole slice or block of each becomes NaN", NonfiniteWarning)


@contextlib.contextmanager
def named_errors(path: str, array: Typed, rule: Rule) -> Iterator[None]:
    """In `with`, an error of a format names the leaf and the rule too."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        # Not the error's own class, which may want other arguments.
        kind = next(k for k in (NotImplementedError, TypeError, ValueError) if isinstance(error, k))
        raise kind(
            f"{path!r}, {array.dtype}{list(array.shape)}, can't be quantized by the rule '{rule}': {error}"
        ) from error


class UnusedRuleWarning(UserWarning):
    """A rule that matched no leaf, or rules that changed none: often a misspelt pattern."""


def unused_rules(rules: Sequence[Rule], chosen: Iterable[Rule | None]) -> tuple[str, ...]:
    """The `rules`, as text, that are neither among the `chosen` ones nor optional."""
    used = set(map(id, chosen))
    return tuple(str(rule) for rule in rules if id(rule) not in used and not rule.optional)


def warn_unused_rules(rules: Sequence[Rule], chosen: Mapping[str, Rule | None]) -> bool:
    """Warn of `rules` that were chosen for no array, given the choice for each floating point array by its name."""
    unused = unused_rules(rules, chosen.values())
    if unused:
        some = ", ".join(map(repr, list(chosen)[:3])) or "there is none"
        message = f"no floating point array is left for {', '.join(unused)}; names look like this: {some}"
        warn(message, UnusedRuleWarning)
    return bool(unused)
