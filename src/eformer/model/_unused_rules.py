"""Rules that match no array: often a misspelt pattern."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eformer._warnings import warn

from ._rules import Rule


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
