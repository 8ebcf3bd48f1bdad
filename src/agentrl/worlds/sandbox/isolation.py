"""Run a tool server over stdio in the sandbox, or in a container of Docker: ``sandbox`` of its entry."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentrl.base.validation import Positive, PositiveWhole, SettingsFile, Text, broken, wrong
from agentrl.tools.config import SERVER_SANDBOXES, WORKDIR, StdioSpec
from agentrl.worlds.containers.docker import limit_arguments
from agentrl.worlds.sandbox.container import program_container
from agentrl.worlds.sandbox.limits import Isolation, SandboxLimits
from agentrl.worlds.sandbox.local import start_code, uses_namespaces
from agentrl.worlds.sandbox.program import Job

_PACKAGE: Final = Path(__file__).parents[2]
"""The folder of ``agentrl``, which is not below the interpreter if it is installed from a clone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSandbox(SandboxLimits):
    """``sandbox`` of an entry. A server lives as long as its trajectory; its other limits are a program's."""

    seconds: Positive = 86400.0
    cpu_seconds: PositiveWhole = 3600
    processes: PositiveWhole = 64
    open_files: PositiveWhole = 256
    isolation: Isolation = "auto"
    image: Text | None = None
    network: Text = "none"
    visible: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        is_docker = self.isolation == "docker"
        if is_docker and self.image is None:
            raise wrong("the image of the container", "image")
        if not is_docker and (self.image is not None or self.network not in ("none", "host")):
            raise broken(": 'image' and a named 'network' are Docker's", hint="write isolation: docker")


@SERVER_SANDBOXES.register("stdio")
def isolate(spec: StdioSpec, given: Any, file: SettingsFile, place: Sequence[str]) -> StdioSpec:
    """Return the server that runs ``spec`` in the sandbox ``given``. Raises ConfigError.

    It starts in an empty private folder, the only one that it may write to; there ``${workdir}`` is ".".
    """
    sandbox = file.check(ServerSandbox, given, *place)
    inner = dataclasses.replace(
        spec,
        args=tuple(arg.replace(WORKDIR, ".") for arg in spec.args),
        env={name: value.replace(WORKDIR, ".") for name, value in spec.env.items()},
    )
    if sandbox.isolation == "docker":
        return _in_container(inner, sandbox)
    return _in_sandbox(inner, sandbox, f"{file.path}: {'.'.join(place)}")


def _in_container(spec: StdioSpec, sandbox: ServerSandbox) -> StdioSpec:
    command = "python3" if spec.command == sys.executable else spec.command
    container = program_container(sandbox, str(sandbox.image), network=sandbox.network)
    arguments = [
        "run", "--interactive", "--init", "--rm", "--label", "agentrl=tool-server",
        *limit_arguments(container), "--user", str(container.user), "--env", f"HOME={container.workdir}",
        *(word for name in spec.env for word in ("--env", name)), "--entrypoint", command,
        str(sandbox.image), *spec.args,
    ]  # fmt: skip
    return dataclasses.replace(spec, command="docker", args=tuple(arguments))


def _in_sandbox(spec: StdioSpec, sandbox: ServerSandbox, where: str) -> StdioSpec:
    namespaces = uses_namespaces(sandbox.isolation, where)
    visible = [os.path.realpath(path) for path in sandbox.visible]
    if spec.command == sys.executable:
        own = (sys.prefix, sys.base_prefix, str(_PACKAGE))
        visible += dict.fromkeys(path for part in own for path in (part, os.path.realpath(part)))
        spec = dataclasses.replace(spec, env={"PYTHONPATH": str(_PACKAGE.parent), **spec.env})
    job = Job(
        visible=tuple(visible), directory=WORKDIR, namespaces=namespaces, network=sandbox.network,
        limits=sandbox.as_dict(), command=(spec.command, *spec.args),
    )  # fmt: skip
    # Values of variables may be secrets, and every user of the machine can read arguments.
    words = (
        "-I",
        "-S",
        "-c",
        start_code("main_attached"),
        json.dumps(dataclasses.asdict(job)),
        json.dumps([*spec.env]),
    )
    return dataclasses.replace(spec, command=sys.executable, args=words)
