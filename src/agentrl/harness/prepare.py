"""Prepare a harness once per process: read its file, find its program, build its working directory."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError
from agentrl.harness.command import SYSTEM_PATH, find_program, folders_of
from agentrl.harness.config import HarnessConfig, ScoreCommand
from agentrl.harness.workspace import build_base, keep_until_exit
from agentrl.tools.sandbox.docker import require_image

_ETC: Final = ("/etc/ssl", "/etc/ca-certificates", "/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf")
"""What clients of HTTP servers read."""
_prepared: dict[tuple[Path, int], Prepared] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A harness that can be run."""

    config: HarnessConfig
    base: Path
    """The archive of its working directory."""
    path: tuple[str, ...]
    """The folders of its PATH, before the system's."""
    visible: tuple[str, ...]
    """The folders that it may read."""


def prepare(path: Path | None) -> Prepared:
    """Return the harness of a YAML file; a changed file is read again. Raises ConfigError."""
    if path is None:
        raise ConfigError(
            "the agent 'command' needs a description of its harness",
            hint="give --agent_cfg_path FILE.yml, or agent_cfg_path of the task",
        )
    config_file = path.resolve()
    with _lock:
        changed = config_file.stat().st_mtime_ns if config_file.exists() else 0
        key = (config_file, changed)
        if key not in _prepared:
            _prepared[key] = _prepare(HarnessConfig.read(path))
        return _prepared[key]


def _prepare(config: HarnessConfig) -> Prepared:
    own, visible = ([], []) if config.image is not None else _programs(config)
    if config.image is not None:
        require_image(config.image, str(config.source))
    missing = [name for name in config.pass_environment if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{config.source}: pass_environment names {missing[0]!r}, which is not set",
            hint=f"export {missing[0]}=…",
        )
    base = keep_until_exit() / "base.tar"
    build_base(config, base)
    unique = sorted({os.path.normpath(folder) for folder in visible})  # a folder before what it holds
    return Prepared(config, base, tuple(dict.fromkeys(own)), tuple(unique))


def _programs(config: HarnessConfig) -> tuple[list[str], list[str]]:
    """Return the folders of PATH, and those that the programs of the harness need. Raises ConfigError."""
    own = [folder for folder in config.path if os.path.isdir(folder)]
    search = os.pathsep.join([*own, os.environ.get("PATH", SYSTEM_PATH)])
    programs = [find_program(config.command, search, f"{config.source}: command")]
    if isinstance(config.score, ScoreCommand):
        where = f"{config.source}: score.command"
        programs.append(find_program(config.score.command, search, where))
    visible = [*_ETC, *config.visible]
    for program in filter(None, programs):
        own.append(os.path.dirname(program))
        visible += folders_of(program)
    for folder in config.path:
        visible += [folder] if os.path.isdir(folder) else []
    return own, visible
