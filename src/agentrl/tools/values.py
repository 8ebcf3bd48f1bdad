"""Check the types of values in a tool server's entry."""

from __future__ import annotations

from typing import Any

from agentrl.errors import ConfigError

_HINT = "docs/tools.md shows an entry with every key"


def require_text(value: Any, where: str) -> str:
    """Return ``value`` if it is text and not empty. Raises ConfigError."""
    if not isinstance(value, str) or not value:
        raise wrong(value, where, "text")
    return value


def require_texts(value: Any, where: str) -> tuple[str, ...]:
    """Return the items of a list as text. Raises ConfigError."""
    if not isinstance(value, (list, tuple)):
        raise wrong(value, where, "a list")
    return tuple(str(item) for item in value)


def require_map(value: Any, where: str) -> dict[str, Any]:
    """Return ``value`` if it is a mapping. Raises ConfigError."""
    if not isinstance(value, dict):
        raise wrong(value, where, "a mapping")
    return {str(key): item for key, item in value.items()}


def require_text_map(value: Any, where: str) -> dict[str, str]:
    """Return a mapping with its values as text. Raises ConfigError."""
    return {key: str(item) for key, item in require_map(value, where).items()}


def require_flag(value: Any, where: str) -> bool:
    """Return ``value`` if it is true or false. Raises ConfigError."""
    if not isinstance(value, bool):
        raise wrong(value, where, "true or false")
    return value


def require_number(value: Any, where: str, *, least: float) -> float:
    """Return ``value`` if it is a number from ``least`` on. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        raise wrong(value, where, f"a number ≥ {least:g}")
    return value


def wrong(value: Any, where: str, expected: str) -> ConfigError:
    """Return the error of a value of the wrong type."""
    return ConfigError(f"{where} is {value!r}; it must be {expected}", hint=_HINT)
