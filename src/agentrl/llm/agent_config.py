"""Read ``assets/agent_config.yml``: endpoints of judges and browse models, and their limits."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ConfigError

SECTIONS: Mapping[str, Collection[str]] = {
    "scorer_agent": ("judge_prompt_template", "rubric_prompt_template"),
    "browse_agent": (
        "status", "max_prompt_length", "min_prompt_length", "browse_tools", "default_purpose",
        "tokenizer_path", "enable_logging",
    ),
}  # fmt: skip
"""The sections of the file, each with the settings that are its own."""

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_HINT = "copy assets/agent_config_example.yml and fill it in, or give another file by --agent_config_path"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEndpoint:
    """One model behind an OpenAI-compatible API, with its limits in one process (None: no limit)."""

    model: str
    base_url: str
    api_key: str = field(repr=False)
    max_concurrency: int | None = 32
    """Requests under way at a time."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and reply together."""
    input_price: float = 0.0
    """Price of a million prompt tokens, in any currency."""
    output_price: float = 0.0
    params: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0}, compare=False)
    """Parameters of every request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSection:
    """One section of the file: its endpoints, and the tries and times of each (seconds)."""

    name: str
    models: tuple[ModelEndpoint, ...]
    max_retries: int = 3
    """Tries of one model."""
    retry_delay: float = 1.0
    backoff_factor: float = 2.0
    timeout: float = 60.0
    cost_limit: float | None = None
    """What one process may spend on this section, in the currency of the prices; None: no limit."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings that only this section has."""


_ENDPOINT_KEYS = frozenset(item.name for item in fields(ModelEndpoint))
_LIMITS = ("max_concurrency", "requests_per_minute", "tokens_per_minute", "input_price", "output_price")
_REQUIRED = ("model", "base_url", "api_key")
_NUMBERS: Mapping[str, tuple[type, float]] = {
    "max_retries": (int, 1), "retry_delay": (float, 0), "backoff_factor": (float, 1),
    "timeout": (float, 0.001), "cost_limit": (float, 0), "max_concurrency": (int, 1),
    "requests_per_minute": (int, 1), "tokens_per_minute": (int, 1), "input_price": (float, 0),
    "output_price": (float, 0),
}  # fmt: skip
"""The type of each number, and its smallest value."""


def load_section(path: str | Path, name: str) -> AgentSection:
    """Read section ``scorer_agent`` or ``browse_agent``; ``${NAME}`` becomes an environment variable.

    A limit in the section is the default of its models. Raises ConfigError for a missing file, section, key
    or variable, an unknown key and a wrong value.
    """
    section = _read(Path(path)).get(name)
    if not isinstance(section, dict) or not section.get("models"):
        raise ConfigError(f"{path} has no section {name} with models", hint=_HINT)
    where = f"{path}: {name}"
    values = _expanded(section, where)
    own = {
        "models", "max_retries", "retry_delay", "backoff_factor", "timeout", "cost_limit", "extra_body",
        *_LIMITS,
    }  # fmt: skip
    _refuse_unknown(values, {*own, *SECTIONS[name]}, where)
    models = values.pop("models")
    if not isinstance(models, list):
        raise ConfigError(f"{where}.models is not a list", hint=_HINT)
    numbers = {key: _number(where, key, values.pop(key)) for key in tuple(values) if key in _NUMBERS}
    defaults = {key: numbers.pop(key) for key in _LIMITS if key in numbers}
    extra = _mapping(values.pop("extra_body", None), f"{where}.extra_body")
    endpoints = tuple(_endpoint(item, defaults, extra, f"{where}.models") for item in models)
    return AgentSection(name=name, models=endpoints, settings=values, **numbers)


def has_section(path: str | Path, name: str) -> bool:
    """Return whether there is such a file with such a section, and its ``status`` is not false."""
    if not Path(path).exists():
        return False
    section = _read(Path(path)).get(name)
    return isinstance(section, dict) and bool(section.get("status", True))


def section_values(path: str | Path, name: str) -> dict[str, Any]:
    """Return a section as it stands in the file, variables expanded; {} without the file or the section."""
    section = _read(Path(path)).get(name) if Path(path).exists() else None
    return dict(_expanded(section, f"{path}: {name}")) if isinstance(section, dict) else {}


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{where} is not a mapping", hint="write parameters as {temperature: 0}")
    return value or {}


def _endpoint(item: Any, defaults: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> ModelEndpoint:
    """Return one model; ``extra`` are parameters of every request of the section."""
    missing = [key for key in _REQUIRED if not isinstance(item, dict) or not item.get(key)]
    if missing:
        raise ConfigError(f"{where}: an entry lacks {', '.join(missing)}", hint=_HINT)
    _refuse_unknown(item, {*_ENDPOINT_KEYS, "extra_body"}, where)
    given: dict[str, Any] = {key: _number(where, key, item[key]) for key in item if key in _NUMBERS}
    params = _mapping(item["params"], f"{where}: params") if "params" in item else {"temperature": 0}
    given["params"] = {**params, **extra, **_mapping(item.get("extra_body"), f"{where}: extra_body")}
    given |= {key: str(item[key]) for key in _REQUIRED}
    return ModelEndpoint(**{**defaults, **given})


def _number(where: str, key: str, value: Any) -> Any:
    kind, least = _NUMBERS[key]
    if value is None and key not in ("max_retries", "retry_delay", "backoff_factor", "timeout"):
        return None if kind is int or key == "cost_limit" else 0.0
    try:
        number = kind(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}.{key} is {value!r}", hint="limits, tries and times are numbers"
        ) from error
    if isinstance(value, bool) or not math.isfinite(number) or number < least:
        raise ConfigError(f"{where}.{key} is {value!r}; it must be at least {least:g}")
    return number


def _refuse_unknown(values: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), sorted(known), n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: unknown key {key!r}", hint=hint)


def _read(path: Path) -> dict[str, Any]:
    try:
        stat = path.stat()
        content = _parsed(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise ConfigError(
            f"the agent configuration {path} cannot be read: {error.strerror}", hint=_HINT
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", hint="correct that line") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a mapping", hint=_HINT)
    return content


@lru_cache(maxsize=16)
def _parsed(path: Path, mtime_ns: int, size: int) -> Any:
    """Return the content of a file, parsed once per version of the file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _expanded(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return {key: _expanded(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item, where) for item in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _variable(match.group(1), where), value)
    return value


def _variable(name: str, where: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ConfigError(
            f"{where} names the environment variable {name}, which is not set", hint=f"export {name}=…"
        )
    return value
