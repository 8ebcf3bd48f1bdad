"""Open a sandbox from its configuration: on this machine, or in Docker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from agentrl.errors import ConfigError
from agentrl.tools.sandbox.docker import DockerSandbox
from agentrl.tools.sandbox.limits import Execution, SandboxLimits
from agentrl.tools.sandbox.local import LocalSandbox

WHERE = "config of the sandbox"


class Sandbox(Protocol):
    """A private directory, and programs that run in it one after the other."""

    async def run(self, code: str, stdin: str = "") -> Execution:
        """Run a program. Raises ToolServerError if the sandbox itself fails."""
        ...

    async def close(self) -> None:
        """Delete the directory. Idempotent."""
        ...


def open_sandbox(config: Mapping[str, Any]) -> Sandbox:
    """Return a sandbox with the limits and the ``isolation`` of ``config``. Raises ConfigError.

    Other keys are ignored: verl's configuration of its sandbox tool works too.
    """
    limits = SandboxLimits.of(config, WHERE)
    isolation = config.get("isolation", "auto")
    if isolation == "docker":
        return DockerSandbox(limits, image=str(config.get("image", "python:3.12-slim")))
    if isolation not in ("auto", "namespaces", "limits"):
        raise ConfigError(
            f"{WHERE}: isolation is {isolation!r}", hint="choose auto, namespaces, limits or docker"
        )
    visible = config.get("visible", [])
    if not isinstance(visible, list) or not all(isinstance(path, str) for path in visible):
        raise ConfigError(f"{WHERE}: visible is {visible!r}", hint="give a list of folders")
    python = config.get("python")
    return LocalSandbox(
        limits,
        isolation=isolation,
        python=None if python is None else str(python),
        visible=tuple(visible),
    )
