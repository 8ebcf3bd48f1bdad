"""Read the filter of trajectories from the query of a URL, and write it back: each filter is a permalink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar
from urllib.parse import urlencode

from agentrl.errors import ConfigError
from agentrl.store.views.trajectories import TrajectoryOrder
from agentrl.store.views.trajectory_filter import Bounds, TrajectoryFilter

FIELDS: Final = (
    "status", "split", "task", "step", "version", "tool", "failure", "label", "text",
    "min_score", "max_score", "min_tokens", "max_tokens", "min_turns", "max_turns", "order",
)  # fmt: skip
_MAX_CHARS = 500
Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterForm:
    """The fields of the form as they were given, without empty ones, and what they mean."""

    given: Mapping[str, str]
    wanted: TrajectoryFilter
    order: TrajectoryOrder

    def value(self, name: str) -> str:
        """Return a field as it was given; empty if it was not."""
        return self.given.get(name, "")

    def query(self, **changes: str | None) -> str:
        """Return the query of a URL with this filter and ``changes``; None leaves a field out."""
        fields = {**self.given, **changes}
        return urlencode({name: value for name, value in fields.items() if value})


def read_form(query: Mapping[str, str]) -> FilterForm:
    """Return the filter that a query asks for. Raises ConfigError that names a bad field."""
    given = {name: query[name].strip() for name in FIELDS if query.get(name, "").strip()}
    for name, value in given.items():
        if len(value) > _MAX_CHARS:
            raise ConfigError(f"{name} has {len(value)} characters", hint=f"give at most {_MAX_CHARS}")
    wanted = TrajectoryFilter(
        status=given.get("status"),
        score=Bounds(_number("min_score", given), _number("max_score", given)),
        step=_whole("step", given), split=given.get("split"), task=given.get("task"), tool=given.get("tool"),
        failure=given.get("failure"), text=given.get("text"), version=_whole("version", given),
        tokens=Bounds(_number("min_tokens", given), _number("max_tokens", given)),
        turns=Bounds(_number("min_turns", given), _number("max_turns", given)),
        label=given.get("label"),
    )  # fmt: skip
    order = _choice("order", TrajectoryOrder, given) or TrajectoryOrder.NEWEST
    return FilterForm(given=given, wanted=wanted, order=order)


def _choice(name: str, kind: type[Choice], given: Mapping[str, str]) -> Choice | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise ConfigError(f"{name} is {value[:80]!r}", hint=f"choose one of {known}") from None


def _whole(name: str, given: Mapping[str, str]) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not value.isdecimal() or len(value) > 12:
        raise ConfigError(f"{name} is {value[:80]!r}", hint="give a whole number, 0 or more")
    return int(value)


def _number(name: str, given: Mapping[str, str]) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{name} is {value[:80]!r}", hint="give a number") from None
