"""Run in the sandbox what a model or its operator names: programs of a model, and tool servers over stdio.

``isolation: docker`` runs them in a container of Docker instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

from agentrl.base.user_code import call_name
from agentrl.base.validation import Positive, PositiveWhole, SettingsFile, Text, broken, read_config, wrong
from agentrl.errors import ToolServerError
from agentrl.tools.config import SERVER_SANDBOXES, WORKDIR, StdioSpec
from agentrl.tools.python import StatefulTool, tool
from agentrl.tools.tool import Schema, function_schema
from agentrl.worlds.containers.container import Container, ContainerSpec, Execution
from agentrl.worlds.containers.docker import DockerContainer, limit_arguments
from agentrl.worlds.sandbox.local import Isolation, LocalSandbox, SandboxLimits, start_code, uses_namespaces
from agentrl.worlds.sandbox.program import MAIN, Job

_WORK: Final = "/work"
_USER: Final = "65534:65534"
_LIFE_SECONDS: Final = 86400.0
_CONTROL_SECONDS: Final = 120.0
_WRITE: Final = f"rm -rf {MAIN} && cat > {MAIN}"
_SIGNALLED: Final = 128
"""Exit codes above this name a signal."""
_VARIABLES: Final = {"HOME": _WORK, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
_EXCEEDED = {
    "time": "the program was stopped: it took too long",
    "memory": "the program was stopped: it used too much memory",
    "output": "the program was stopped: it wrote too much output",
    "files": "the program was stopped: it wrote too many files",
}
_PACKAGE: Final = Path(__file__).parents[2]
"""The folder of ``agentrl``, which is not below the interpreter if it is installed from a clone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig(SandboxLimits):
    """How a model's programs are confined."""

    isolation: Isolation = "auto"
    image: Text = "python:3.12-slim"
    """Of ``isolation: docker``."""
    python: Text | None = None
    """The interpreter, with its packages; None: this one, without them."""
    visible: tuple[Text, ...] = ()
    """Further folders that programs may read."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Return the settings in ``config``. Raises ConfigError.

        Other keys are ignored: verl's configuration of its sandbox tool works too.
        """
        known = {item.name for item in dataclasses.fields(cls)}
        chosen = {name: value for name, value in config.items() if name in known}
        return read_config(cls, chosen, "config of the sandbox", hint="docs/sandbox.md lists the keys")


def sandbox_names(config: Any) -> list[str]:
    """Return the name that a sandbox's ``config`` needs permission for; none if it sets limits alone.

    Isolation, image, interpreter and visible folders decide what a program reaches: they are one name.
    """
    more = ("isolation", "image", "python", "visible")
    chosen = {name: config[name] for name in more if name in config} if isinstance(config, Mapping) else {}
    return [call_name("sandbox", json.dumps(chosen, sort_keys=True))] if chosen else []


class Sandbox(Protocol):
    """A private directory, and programs that run in it one after the other."""

    async def run(self, code: str, stdin: str = "") -> Execution:
        """Run a program. Raises ToolServerError if the sandbox itself fails."""
        ...

    async def close(self) -> None:
        """Delete the directory. Idempotent."""
        ...


def open_sandbox(config: Mapping[str, Any]) -> Sandbox:
    """Return the sandbox that ``config`` describes. Raises ConfigError."""
    chosen = SandboxConfig.of(config)
    if chosen.isolation == "docker":
        return ContainerSandbox(chosen, image=chosen.image)
    return LocalSandbox(chosen, isolation=chosen.isolation, python=chosen.python, visible=chosen.visible)


@tool("python_sandbox")
class PythonSandbox(StatefulTool):
    """Python in a sandbox. Programs of one trajectory share a private directory; ``config`` holds limits."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._sandboxes: dict[str, Sandbox] = {}
        open_sandbox(self.config)  # report an invalid configuration at the start

    def get_openai_tool_schema(self) -> Schema:
        """Return the schema of a tool with one parameter, the code."""
        code = {"type": "string", "description": "The program. It prints what you want to read."}
        return function_schema(
            "code_interpreter",
            "Runs a Python program and returns its output. Files stay for the next program.",
            {"type": "object", "properties": {"code": code}, "required": ["code"]},
        )

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        """Open the trajectory's sandbox."""
        self._sandboxes[instance_id] = open_sandbox(self.config)
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        """Run ``parameters["code"]``; return its output and error output."""
        code = parameters.get("code")
        if not isinstance(code, str):
            raise ValueError("the parameter 'code' must be text")
        return output_text(await self._sandboxes[instance_id].run(code))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Delete the trajectory's sandbox."""
        sandbox = self._sandboxes.pop(instance_id, None)
        if sandbox is not None:
            await sandbox.close()


def output_text(done: Execution) -> str:
    """Return what the model reads of an execution."""
    parts = [done.stdout.rstrip("\n"), done.stderr.rstrip("\n")]
    if done.exceeded is not None:
        parts.append(f"[{_EXCEEDED[done.exceeded]}]")
    elif done.exit_code < 0:
        parts.append(f"[the program was ended by signal {-done.exit_code}]")
    elif done.exit_code > 0 and not done.stderr:
        parts.append(f"[the program ended with exit code {done.exit_code}]")
    return "\n".join(part for part in parts if part) or "[the program printed nothing]"


def program_container(limits: SandboxLimits, image: str, *, network: str = "none") -> ContainerSpec:
    """Return a container without rights: programs start in ``/work``, and write there and to ``/tmp``."""
    return ContainerSpec(
        name="sandbox", image=image, environment=_VARIABLES, workdir=_WORK, user=_USER,
        writable=(_WORK, "/tmp"), network=network, cpus=1.0, memory_mb=limits.memory_mb,
        storage_mb=limits.disk_mb, files=limits.files, processes=limits.processes,
        open_files=limits.open_files, cpu_seconds=limits.cpu_seconds, seconds=_LIFE_SECONDS,
    )  # fmt: skip


class ContainerSandbox:
    """A container of Docker, and programs that run in it one after the other."""

    def __init__(self, limits: SandboxLimits, *, image: str) -> None:
        """``image`` needs ``python3`` and ``sh``."""
        self._limits = limits
        self._spec = program_container(limits, image)
        self._container: Container | None = None
        self._turn = asyncio.Lock()

    async def run(self, code: str, stdin: str = "") -> Execution:
        """Run a program to its end or its limits. Raises ToolServerError if the container fails.

        After one that fills or locks its directory, or leaves processes that block the container, the next
        one begins in a new container.
        """
        limits = self._limits
        text = code.encode("utf-8", "surrogatepass")
        async with self._turn:
            try:
                container = await self._written(text)
            except ToolServerError:
                if self._container is None:  # it does not start
                    raise
                await self.close()
                container = await self._written(text)
            done = await container.run(
                ("python3", "-s", MAIN), seconds=limits.seconds, output_bytes=limits.output_bytes,
                stdin=stdin.encode("utf-8", "surrogatepass"),
            )  # fmt: skip
            try:  # kill what the program left running; the container's first process has another user
                await self._shell(container, "kill -9 -1; true")
            except ToolServerError:
                await self.close()
        exit_code = done.exit_code if done.exit_code <= _SIGNALLED else _SIGNALLED - done.exit_code
        exceeded = done.exceeded or ("memory" if exit_code == -signal.SIGKILL else None)
        return dataclasses.replace(done, exit_code=exit_code, exceeded=exceeded)

    async def close(self) -> None:
        """Remove the container. Idempotent."""
        container, self._container = self._container, None
        if container is not None:
            with contextlib.suppress(ToolServerError):
                await container.stop()

    async def _written(self, code: bytes) -> Container:
        """Return the container, started, with the program in it. Raises ToolServerError."""
        if self._container is None:
            self._container = await DockerContainer(self._spec).__aenter__()
        await self._shell(self._container, _WRITE, code)
        return self._container

    async def _shell(self, container: Container, line: str, stdin: bytes = b"") -> None:
        done = await container.run(("sh", "-c", line), seconds=_CONTROL_SECONDS, stdin=stdin)
        if not done.succeeded:
            why = done.stderr.strip()[-300:] or done.exceeded or f"exit code {done.exit_code}"
            raise ToolServerError(f"the container of the sandbox cannot run {line!r}: {why}")


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
