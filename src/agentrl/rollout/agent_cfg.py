"""Find the YAML file of an agent: ``agent_cfg_path`` of its task, else ``--agent_cfg_path``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.settings_file import read_settings


def agent_cfg_path(of_task: str | None, of_flag: str | None) -> Path | None:
    """Return the YAML file of an agent; None without one. Raises ConfigError for a path outside the folder.

    A task comes from the database, so it may name only files below the folder in which this process was
    started.
    """
    if of_task is None:
        return None if of_flag is None else Path(of_flag)
    path = Path(of_task)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"agent_cfg_path {of_task!r} of a task is not below the folder in which this process was started",
            hint="give a relative path without '..', or use --agent_cfg_path",
        )
    return path


class AgentCfg(dict[str, Any]):
    """The settings of an agent's YAML file: ``cfg.name``, ``cfg["name"]``, ``cfg.get("name")``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(map(str, self)) or "nothing"
            raise AttributeError(f"the agent's cfg has no {name!r}; it has {known}") from None


def read_agent_cfg(path: Path | None) -> AgentCfg:
    """Return the settings in a YAML file; empty without one. Raises ConfigError for other files."""
    if path is None:
        return AgentCfg()
    file = read_settings(path, what="the agent's file", hint="write name: value lines")
    if not isinstance(file.content, dict | None):
        raise file.error(f"the file is {type(file.content).__name__}, not a mapping")
    return AgentCfg({str(key): _cfg(item) for key, item in (file.content or {}).items()})


def _cfg(value: Any) -> Any:
    if isinstance(value, dict):
        return AgentCfg({str(key): _cfg(item) for key, item in value.items()})
    return [_cfg(item) for item in value] if isinstance(value, list) else value
