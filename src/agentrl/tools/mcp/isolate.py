"""Run MCP servers over stdio in containers or in the sandbox of this machine: ``sandbox`` of an entry."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from agentrl.tools.sandbox.docker import container_limits
from agentrl.tools.sandbox.limits import SandboxLimits
from agentrl.tools.sandbox.local import start_code, uses_namespaces
from agentrl.tools.sandbox.program import Job
from agentrl.tools.specs import WORKDIR, StdioSpec
from agentrl.validation import Positive, PositiveWhole, Text, broken, wrong

_PACKAGE: Final = Path(__file__).parents[2]
"""The folder of this package, which is not below the interpreter if it is installed from a clone."""
_LIMITS: Final = tuple(item.name for item in dataclasses.fields(SandboxLimits))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSandbox(SandboxLimits):
    """``sandbox`` of an entry. A server lives as long as its trajectory; its other limits are a program's."""

    seconds: Positive = 86400.0
    cpu_seconds: PositiveWhole = 3600
    processes: PositiveWhole = 64
    open_files: PositiveWhole = 256
    isolation: Literal["auto", "namespaces", "limits", "docker"] = "auto"
    image: Text | None = None
    network: Text = "none"
    visible: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        is_docker = self.isolation == "docker"
        if is_docker and self.image is None:
            raise wrong("the image of the container", "image")
        if not is_docker and (self.image is not None or self.network not in ("none", "host")):
            raise broken(": 'image' and a named 'network' are Docker's", hint="write isolation: docker")


def isolated(spec: StdioSpec, sandbox: ServerSandbox, where: str) -> StdioSpec:
    """Return the server that runs ``spec`` in ``sandbox``. Raises ConfigError, which names ``where``.

    It starts in an empty private folder, the only one that it may write to; there ``${workdir}`` is ".".
    """
    inner = dataclasses.replace(
        spec,
        args=tuple(arg.replace(WORKDIR, ".") for arg in spec.args),
        env={name: value.replace(WORKDIR, ".") for name, value in spec.env.items()},
    )
    if sandbox.isolation == "docker":
        return _in_container(inner, sandbox)
    return _in_sandbox(inner, sandbox, where)


def _in_container(spec: StdioSpec, sandbox: ServerSandbox) -> StdioSpec:
    command = "python3" if spec.command == sys.executable else spec.command
    named = [word for name in spec.env for word in ("--env", name)]
    arguments = [
        "run", "--interactive", "--init", "--label", "agentrl=tool-server",
        *container_limits(sandbox, network=sandbox.network), *named, "--entrypoint", command,
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
        limits={name: getattr(sandbox, name) for name in _LIMITS}, command=(spec.command, *spec.args),
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
