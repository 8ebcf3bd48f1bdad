"""Validate what comes from outside (files, rows, options, requests): errors name place, value and fix.

A dataclass is the declaration: pydantic reads its annotations, and its ``__post_init__`` checks what fields
say about each other. ``check`` raises the error of each caller; ``SettingsFile.check``, for files that people
write, names the line too.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_args, get_type_hints

import yaml
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

_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The content of a file. ``hint`` says how such a file is written."""

    path: Path
    content: Any = field(repr=False)
    hint: str
    _text: str = field(repr=False)

    def error(self, text: str, *place: str | int, hint: str | None = None) -> ConfigError:
        """Return an error with the file and the line of the value at ``place``."""
        return ConfigError(f"{self._where(place)}: {text}", hint=hint or self.hint)

    def check(self, kind: type[T], value: Any, *place: str | int, **own: Any) -> T:
        """Return ``value``, which stands at ``place``, as the dataclass ``kind``.

        ``own`` are fields that no file gives. Raises ConfigError for everything that is wrong.
        """
        for key in own.keys() & value.keys() if isinstance(value, dict) else ():
            raise self.error(f"unknown key {dotted((*place, key))!r}", *place, key)
        try:
            given = {**value, **own} if isinstance(value, dict) else value
            return validate(kind, given, folder=self.path.parent)
        except ValidationError as error:
            found = problems_of(error, value, *place, whole="the file")
        if len(found) == 1:
            raise self.error(found[0].text, *found[0].place, hint=found[0].hint)
        listed = "\n  ".join(f"{self._where(each.place)}: {each}" for each in found)
        raise ConfigError(listed, hint=self.hint)

    def expand(self, value: Any, *place: str | int, keep: str = "") -> Any:
        """Return ``value`` with ``${NAME}`` and ``${NAME:-default}`` in its texts replaced, except ``keep``.

        Raises ConfigError for an environment variable that is not set.
        """
        if isinstance(value, dict):
            return {key: self.expand(item, *place, key, keep=keep) for key, item in value.items()}
        if isinstance(value, list):
            return [self.expand(item, *place, index, keep=keep) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value

        def replace(found: re.Match[str]) -> str:
            name, default = found[1], found[2]
            if found[0] == keep:
                return keep
            if name not in os.environ and default is None:
                raise self.error(
                    f"{dotted(place)} names the environment variable {name}, which is not set",
                    *place,
                    hint=f"export {name}=…, or write ${{{name}:-default}}",
                )
            return os.environ.get(name) or default or ""

        return _VARIABLE.sub(replace, value)

    def refuse_repeated(self, key: str) -> None:
        """Raise ConfigError if the mapping under the top-level ``key`` has a key twice.

        YAML keeps the last one of them, and nobody would miss the other.
        """
        root = yaml.compose(self._text, Loader=yaml.SafeLoader)
        for name, value in root.value if isinstance(root, yaml.MappingNode) else ():
            if name.value != key or not isinstance(value, yaml.MappingNode):
                continue
            seen: set[str] = set()
            for inner, _ in value.value:
                if inner.value in seen:
                    raise ConfigError(
                        f"{self.path}:{inner.start_mark.line + 1}: {key}.{inner.value} is there twice",
                        hint="leave one out, or give it another name",
                    )
                seen.add(inner.value)

    def _where(self, place: Place) -> str:
        line = _line_of(self._text, place)
        return str(self.path) if line is None else f"{self.path}:{line}"


def read_settings(path: str | Path, *, hint: str, what: str = "") -> SettingsFile:
    """Return the content of a file: JSON if it is named .json, else YAML.

    ``what`` is put before the path where the file cannot be read. Raises ConfigError.
    """
    path = Path(path)
    named = f"{what} {path}".strip()
    try:
        state = path.stat()
        found = _parsed(path, hint, state.st_mtime_ns, state.st_size)
        return replace(found, content=copy.deepcopy(found.content))
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} is not UTF-8: {error.reason}", hint="save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno} is not JSON: {error.msg}", hint="correct that line"
        ) from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}{line} is not YAML: {problem or error}", hint="correct that line"
        ) from error


@lru_cache(maxsize=64)
def _parsed(path: Path, hint: str, mtime_ns: int, size: int) -> SettingsFile:
    """Return the content of a file, parsed once per version of the file."""
    text = path.read_text(encoding="utf-8")
    content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    return SettingsFile(path, content, hint, text)


def _line_of(text: str, place: Place) -> int | None:
    """Return the line of the deepest value on the way to ``place``; None for the whole file."""
    line = None
    node = yaml.compose(text, Loader=yaml.SafeLoader) if place else None
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == str(part)]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            found = [(item, item) for item in node.value[part : part + 1]]
        else:
            break
        if not found:
            break
        key, node = found[-1]
        line = key.start_mark.line + 1
    return line


_SHOWN = 200
_SECRET = re.compile(
    r"(?!(?:max_[a-z_]*tokens|stop_token_ids)\Z).*(key|token|secret|password|headers|authorization)",
    re.IGNORECASE | re.DOTALL,
)
"""Names of values that errors do not show; ``max_tokens`` and its like are counts, ``stop_token_ids`` ids."""


class SettingsModel:
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

    def __str__(self) -> str:
        return f"{self.text} ({self.hint})" if self.hint else self.text


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


def problems_of(
    error: ValidationError, given: Any, *place: str | int, whole: str = "it", most: int | None = None
) -> list[Problem]:
    """Return what is wrong with ``given``, which stands at ``place``; ``whole`` names it if that is empty.

    At most ``most`` problems are returned; None: all.
    """
    try:
        return [_problem(item, given, place, whole) for item in error.errors(include_url=False)[:most]]
    except UnicodeEncodeError:  # pydantic cannot name a key that UTF-8 cannot hold
        where = dotted(place) or whole
        return [Problem(place, f"{where} has a key with a lone surrogate, half an emoji", "correct that key")]


def check(kind: type[T], given: Any, refuse: Callable[[Problem], Exception], *place: str | int) -> T:
    """Return ``given``, which stands at ``place``, as ``kind``. Raises what ``refuse`` returns."""
    try:
        return validate(kind, given)
    except ValidationError as error:
        raise refuse(problems_of(error, given, *place, most=1)[0]) from error


def read_config(
    kind: type[T], given: Any, where: str, *, hint: str, error: type[AgentRLError] = ConfigError
) -> T:
    """Return ``given``, which is in no file, as ``kind``. Raises ``error``, which begins with ``where``."""
    return check(kind, given, lambda problem: error(f"{where}: {problem.text}", hint=problem.hint or hint))


def _problem(item: ErrorDetails, given: Any, outer: Place, whole: str) -> Problem:
    context: Mapping[str, Any] = item.get("ctx") or {}
    inner = (*(part for part in item["loc"] if not _is_tag(part)), *context.get("place", ()))
    place = (*outer, *inner)
    hint = context.get("hint")
    name = _cut(dotted(place))
    match item["type"]:
        case "unknown_key":
            place = (*place, context["key"])
            text = f"unknown key {_cut(dotted(place))!r}"
            return Problem(place, text, did_you_mean(context["key"], context["known"]))
        case "missing":
            return Problem(place, f"{name!r} is missing", hint)
        case "broken_rule":
            return Problem(place, f"{name} {context['text']}".strip(), hint)
        case "value_error":
            return Problem(place, f"{name or whole}: {context['error']}", hint)
        case "wrong_value":
            expected = context["expected"]
        case "literal_error" | "enum":
            expected = context["expected"]
            hint = nearest(_value(given, inner), re.findall(r"'([^']*)'", expected))
        case kind:
            bounds = {name: f"{it:g}" if isinstance(it, float) else it for name, it in context.items()}
            expected = _EXPECTED[kind].format_map(bounds) if kind in _EXPECTED else item["msg"]
    if item["loc"][-1:] == ("[key]",):
        key = _cut(repr(place[-1]))
        return Problem(place, f"{dotted(place[:-1])} has the key {key}; it must be {expected}", hint)
    shown = _shown(_value(given, inner), place)
    return Problem(place, f"{name or whole} is {shown}; it must be {expected}", hint)


def _is_tag(part: str | int) -> bool:
    """Return whether ``part`` of pydantic's location names no field: ``[key]``, or a union's ``<name>``."""
    return isinstance(part, str) and part[:1] + part[-1:] in ("[]", "<>")


def _value(given: Any, place: Place) -> Any:
    for part in place:
        if isinstance(given, str):  # one text in place of a list of texts
            return given
        try:
            given = given[part]
        except (LookupError, TypeError):
            return None
    return given


def _shown(value: Any, place: Place) -> str:
    """Return a value as errors show it; of one that may be a secret only its kind."""
    if any(isinstance(part, str) and _SECRET.match(part) for part in place):
        return f"of the kind {type(value).__name__}"
    try:
        return _cut(ascii(value))
    except RecursionError:
        return "nested too deeply"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


_EXPECTED: Mapping[str, str] = {
    "string_type": "text",
    "string_unicode": "text without a lone surrogate",
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
    "less_than": "below {lt}",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_short": "a list of at least {min_length}",
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
