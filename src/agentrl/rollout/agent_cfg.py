"""Find the YAML file of an agent: ``agent_cfg_path`` of its task, else ``--agent_cfg_path``."""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import ConfigError


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
