"""Read a YAML or JSON file that a person wrote; its errors name the file, the line and the key."""

from __future__ import annotations

import copy
import json
import os
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from agentrl.errors import ConfigError, Place, dotted

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
        from pydantic import ValidationError

        from agentrl.validation import problems_of, validate

        try:
            given = {**value, **own} if isinstance(value, dict) else value
            return validate(kind, given, folder=self.path.parent)
        except ValidationError as error:
            found = problems_of(error, value, *place, whole="the file")
        if len(found) == 1:
            raise self.error(found[0].text, *found[0].place, hint=found[0].hint)
        listed = [
            f"{self._where(each.place)}: {each.text}" + (f" ({each.hint})" if each.hint else "")
            for each in found
        ]
        raise ConfigError("\n  ".join(listed), hint=self.hint)

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
