"""Validate what users write by pydantic, and explain its errors: the place, the value, the limit and the fix.

A dataclass that derives from ``Settings`` is the declaration: pydantic reads its annotations, and its
``__post_init__`` checks what fields say about each other.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from agentrl.errors import AgentRLError, ConfigError, Place, did_you_mean, dotted, nearest

T = TypeVar("T")

_SHOWN = 200
_SECRET = re.compile(r"key|token|secret|password|headers|authorization", re.IGNORECASE)


class Settings:
    """Base of the dataclasses that users write.

    An unknown key is an error that names the nearest known one. A key without a value has its default.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        hints = get_type_hints(source)
        known = [item.name for item in dataclasses.fields(source)]
        nullable = {name for name in known if NoneType in get_args(hints[name])}

        def refuse_unknown_keys(given: Any) -> Any:
            if not isinstance(given, Mapping):
                return given
            for key in given:
                if key not in known:
                    raise PydanticCustomError("unknown_key", "unknown", {"key": key, "known": known})
            return {key: value for key, value in given.items() if value is not None or key in nullable}

        return no_info_before_validator_function(refuse_unknown_keys, handler(source))


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and how to correct it."""

    place: Place
    text: str
    hint: str | None


def wrong(expected: str, *place: str | int, hint: str | None = None) -> PydanticCustomError:
    """Return what a validator raises if its value, or the one at ``place`` below it, must be ``expected``."""
    return PydanticCustomError("wrong_value", "wrong", {"expected": expected, "place": place, "hint": hint})


def broken(text: str, *place: str | int, hint: str | None = None) -> PydanticCustomError:
    """Return what a validator raises for a rule that no single value breaks: the place, then ``text``."""
    return PydanticCustomError("broken_rule", "broken", {"text": text, "place": place, "hint": hint})


def validate(kind: type[T], given: Any, *, folder: Path | None = None) -> T:
    """Return ``given`` as ``kind``; ``folder`` is that of relative paths. Raises a ValidationError."""
    found: T = _adapter(cast("Hashable", kind)).validate_python(given, context=folder)
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def problems_of(error: ValidationError, given: Any, *place: str | int, whole: str = "it") -> list[Problem]:
    """Return what is wrong with ``given``, which stands at ``place``; ``whole`` names it if that is empty."""
    return [_problem(item, given, place, whole) for item in error.errors(include_url=False)]


def read_config(
    kind: type[T], given: Any, where: str, *, hint: str, error: type[AgentRLError] = ConfigError
) -> T:
    """Return ``given``, which is in no file, as ``kind``. Raises ``error``, which begins with ``where``."""
    try:
        return validate(kind, given)
    except ValidationError as found:
        problem = problems_of(found, given)[0]
        raise error(f"{where}: {problem.text}", hint=problem.hint or hint) from found


def _problem(item: ErrorDetails, given: Any, outer: Place, whole: str) -> Problem:
    context: Mapping[str, Any] = item.get("ctx") or {}
    inner = (*(part for part in item["loc"] if not _is_tag(part)), *context.get("place", ()))
    place = (*outer, *inner)
    hint = context.get("hint")
    match item["type"]:
        case "unknown_key":
            place = (*place, context["key"])
            text = f"unknown key {dotted(place)!r}"
            return Problem(place, text, did_you_mean(context["key"], context["known"]))
        case "missing":
            return Problem(place, f"{dotted(place)!r} is missing", hint)
        case "broken_rule":
            return Problem(place, f"{dotted(place)} {context['text']}".strip(), hint)
        case "value_error":
            return Problem(place, f"{dotted(place) or whole}: {context['error']}", hint)
        case "wrong_value":
            expected = context["expected"]
        case "literal_error" | "enum":
            expected = context["expected"]
            hint = nearest(_value(given, inner), re.findall(r"'([^']*)'", expected))
        case kind:
            expected = _EXPECTED[kind].format_map(context) if kind in _EXPECTED else item["msg"]
    if item["loc"][-1:] == ("[key]",):
        return Problem(place, f"{dotted(place[:-1])} has the key {place[-1]!r}; it must be {expected}", hint)
    shown = _shown(_value(given, inner), place)
    return Problem(place, f"{dotted(place) or whole} is {shown}; it must be {expected}", hint)


def _is_tag(part: str | int) -> bool:
    """Return whether ``part`` of pydantic's location names no field: ``[key]``, or a union's ``<name>``."""
    return isinstance(part, str) and part[:1] + part[-1:] in ("[]", "<>")


def _value(given: Any, place: Place) -> Any:
    for part in place:
        try:
            given = given[part]
        except (LookupError, TypeError):
            return None
    return given


def _shown(value: Any, place: Place) -> str:
    """Return a value as errors show it; of one that may be a secret only its kind."""
    if any(isinstance(part, str) and _SECRET.search(part) for part in place):
        return f"of the kind {type(value).__name__}"
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


_EXPECTED: Mapping[str, str] = {
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "tuple_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "dataclass_type": "a mapping",
    "path_type": "a path",
    "less_than": "below {lt:g}",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "too_long": "a list of at most {max_length}",
}
"""Type of an error of pydantic → what the value must be."""


def _not_blank(text: str) -> str:
    if not text.strip():
        raise wrong("text that is not empty")
    return text


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else value


def _beside(path: Any, info: ValidationInfo) -> Path:
    if not isinstance(path, str) or not path:
        raise wrong("a path")
    return (info.context or Path()) / os.path.expanduser(path)  # Path's raises for a user without a home


Text = Annotated[str, AfterValidator(_not_blank)]
"""Text that is not empty."""
PlainText = Annotated[str, BeforeValidator(_as_text)]
"""Text; numbers and booleans of YAML are read as they are written."""
Switch = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Count = Annotated[int, Strict(), Field(ge=0)]
PositiveWhole = Annotated[int, Strict(), Field(gt=0)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
BesideFile = Annotated[Path, BeforeValidator(_beside)]
"""A path relative to the file that names it."""
