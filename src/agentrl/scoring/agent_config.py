"""Read ``assets/agent_config.yml``: endpoints of judge and browser models, tried in order."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ConfigError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEndpoint:
    """One model behind an OpenAI-compatible API."""

    model: str
    base_url: str
    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSection:
    """One section of the file: its endpoints, and the retries and timeouts of each (seconds)."""

    models: tuple[ModelEndpoint, ...]
    max_retries: int = 3
    retry_delay: float = 1.0
    backoff_factor: float = 2.0
    timeout: float = 60.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All other keys of the section."""


def load_section(path: str | Path, name: str) -> AgentSection:
    """Read section ``scorer_agent`` or ``browse_agent``; ``${NAME}`` becomes an environment variable.

    Raises ConfigError for a missing file, section, key or variable.
    """
    section = _read(Path(path)).get(name)
    if not isinstance(section, dict) or not section.get("models"):
        raise ConfigError(f"{path} has no section {name} with models", hint=_HINT)
    values = _expanded(section, f"{path}: {name}")
    known = {
        key: values.pop(key)
        for key in ("max_retries", "retry_delay", "backoff_factor", "timeout")
        if key in values
    }
    try:
        numbers = {key: (int if key == "max_retries" else float)(value) for key, value in known.items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {name}: {error}", hint="retries and times are numbers") from error
    models = tuple(_endpoint(item, f"{path}: {name}.models") for item in values.pop("models"))
    return AgentSection(models=models, settings=values, **numbers)  # type: ignore[arg-type]


_HINT = "copy assets/agent_config_example.yml and fill it in, or give another file by --agent_config_path"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the agent configuration {path} cannot be read: {error.strerror}", hint=_HINT
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", hint="correct that line") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a mapping", hint=_HINT)
    return content


def _expanded(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return {key: _expanded(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item, where) for item in value]
    return (
        _VARIABLE.sub(lambda match: _variable(match.group(1), where), value)
        if isinstance(value, str)
        else value
    )


def _variable(name: str, where: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ConfigError(
            f"{where} names the environment variable {name}, which is not set", hint=f"export {name}=…"
        )
    return value


def _endpoint(item: Any, where: str) -> ModelEndpoint:
    missing = [
        key for key in ("model", "base_url", "api_key") if not isinstance(item, dict) or not item.get(key)
    ]
    if missing:
        raise ConfigError(f"{where}: an entry lacks {', '.join(missing)}", hint=_HINT)
    return ModelEndpoint(
        model=str(item["model"]), base_url=str(item["base_url"]), api_key=str(item["api_key"])
    )
