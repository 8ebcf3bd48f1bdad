"""Name a weighted sum of scorers: ``{"exact": 0.8, "format": 0.2}`` is ``0.8*exact + 0.2*format``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentrl.documents.sanitize_bson import is_finite

_TERM = re.compile(r"(-?[0-9.]+(?:e[+-]?[0-9]+)?)\*(\S+)")
_PLUS = " + "


def sum_name(weights: Mapping[str, float]) -> str:
    """Return the name of a weighted sum; a single scorer with the weight 1 keeps its name.

    Raises ValueError for no scorer at all, an empty name and a weight that is not a finite number.
    """
    if not weights:
        raise ValueError("it names no scorer")
    for name, weight in weights.items():
        if not name or name != "".join(name.split()):
            raise ValueError(f"{name!r} is not the name of a scorer")
        if isinstance(weight, bool) or not is_finite(weight):
            raise ValueError(f"the weight of {name} is {weight!r}, which is not a number")
    if list(weights.values()) == [1]:
        return next(iter(weights))
    return _PLUS.join(f"{weight!r}*{name}" for name, weight in weights.items())


def scorer_weights(name: str) -> dict[str, float]:
    """Return {scorer: weight} of a task's ``scorer``; of a plain name, {name: 1.0}."""
    terms = [_TERM.fullmatch(term) for term in name.split(_PLUS)]
    if not all(terms):
        return {name: 1.0}
    return {term.group(2): float(term.group(1)) for term in terms if term}
