"""Define containers: what one is made of, the four methods of a back end, and ``@container("name")``."""

from __future__ import annotations

import asyncio
import inspect
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar

from agentrl.base.registry import Registry
from agentrl.documents.record import CommandRun, Ending
from agentrl.errors import Dependency, DependencyKind, ToolServerError
from agentrl.worlds.containers.output import Output

OUTPUT_BYTES: Final = 1 << 20
COPY_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """The image of a container, and the limits of its commands."""

    name: str
    """What it is for, such as ``harness``: letters that stand in its name."""
    image: str | None = None
    """The name of an image, for back ends that pull one."""
    rootfs: str | None = None
    """A folder or a tar archive with a root file system, for the back end ``sandbox``."""
    build: str | None = None
    """A folder with a Dockerfile, for back ends that build images."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every command."""
    workdir: str | None = None
    """Where commands start; it is made if it is missing. None: the image's own, or ``/``."""
    user: str | None = None
    """The user of commands, ``NAME``, ``UID`` or ``UID:GID``. None: the image's own, or root."""
    writable: tuple[str, ...] = ()
    """Folders. With some, commands have no capability and write to these alone; else they write anywhere."""
    network: str = "none"
    """``none``, ``host``, ``gateway`` (nothing but the gateway), or another name that the back end knows."""
    gateway: tuple[str, int] | None = None
    """Host and port of the gateway, with ``network: gateway`` and a back end that ``forwards_gateway``."""
    cpus: float | None = None
    memory_mb: int = 4096
    """Memory of all processes together."""
    storage_mb: int = 10240
    """Files that commands write, where the back end can limit them."""
    files: int = 1 << 20
    """Number of these files."""
    processes: int = 1024
    open_files: int = 65536
    """Of each process."""
    cpu_seconds: int | None = None
    """Of each process."""
    seconds: float
    """The longest life: it ends by itself, also when its owner is killed."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of one back end, such as Kubernetes' namespace."""


_ENDINGS: Final = {
    "time": Ending.TIME_LIMIT, "memory": Ending.MEMORY_LIMIT, "files": Ending.DISK_LIMIT,
    "output": Ending.OUTPUT_LIMIT,
}  # fmt: skip
_SHELL_SIGNAL: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a program did. ``exceeded`` names the limit that ended it: time, memory, output or files."""

    stdout: str
    stderr: str
    exit_code: int
    """Of the program; minus the signal that ended it."""
    exceeded: str | None
    seconds: float
    memory_mb: float
    """Largest memory seen."""
    stdout_bytes: int = 0
    """Bytes of standard output, with those left out of ``stdout``."""
    stderr_bytes: int = 0

    @classmethod
    def of(
        cls, stdout: Output, stderr: Output, *, exit_code: int, exceeded: str | None, seconds: float
    ) -> Self:
        """Return what a program did whose back end does not see its memory."""
        return cls(
            stdout=stdout.text, stderr=stderr.text, exit_code=exit_code, exceeded=exceeded, seconds=seconds,
            memory_mb=0.0, stdout_bytes=stdout.total, stderr_bytes=stderr.total,
        )  # fmt: skip

    @property
    def succeeded(self) -> bool:
        """Return whether the program ended by itself, with exit code 0."""
        return self.exit_code == 0 and self.exceeded is None

    @property
    def as_command_run(self) -> CommandRun:
        """Return it as a Record stores it."""
        if self.exceeded is not None:
            ended = _ENDINGS[self.exceeded]
        elif self.exit_code < 0 or _SHELL_SIGNAL < self.exit_code <= _SHELL_SIGNAL + signal.NSIG:
            ended = Ending.KILLED
        else:
            ended = Ending.EXITED if self.exit_code == 0 else Ending.NONZERO_EXIT
        same = ("exit_code", "seconds", "memory_mb", "stdout", "stderr", "stdout_bytes", "stderr_bytes")
        return CommandRun(ended=ended, **{name: getattr(self, name) for name in same})


class FilesTooLargeError(ToolServerError):
    """What was to be copied is larger than its limit."""


class Container(ABC):
    """One container. Derive from it, and register the class by ``@container("name")``.

    What commands write stays from ``start`` to ``stop``, and so does what they leave running. An instance is
    started once. What fails because the back end is away raises ``back_end_away``, which uses no attempt up.
    """

    forwards_gateway: ClassVar[bool] = False
    """Whether, with ``network: gateway``, commands reach ``spec.gateway`` at the same port of 127.0.0.1."""

    takes_users: ClassVar[bool] = True
    """Whether a command may have another user than the container."""

    def __init__(self, spec: ContainerSpec) -> None:
        self.spec = spec

    @classmethod  # noqa: B027  some back ends can run anything
    def check(cls, spec: ContainerSpec, where: str) -> None:
        """Raise ConfigError, which begins with ``where``, if such a container cannot be run from here.

        It may prepare the machine for all such containers, as by pulling an image. Blocks.
        """

    @abstractmethod
    async def start(self) -> None:
        """Start it. Raises ToolServerError."""

    @abstractmethod
    async def run(
        self,
        command: Sequence[str],
        *,
        seconds: float,
        environment: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        output_bytes: int = OUTPUT_BYTES,
        shown_bytes: int | None = None,
    ) -> Execution:
        """Run a command to its end or to a limit, which kills it. Raises ToolServerError.

        ``environment``, ``workdir`` and ``user`` are added to those of the spec. Each output may have
        ``output_bytes``; its two ends are returned as ``shown_bytes``, None returns all. Commands may run in
        parallel. On cancellation the command is killed.
        """

    @abstractmethod
    async def copy(
        self, archive: Path, *, into: str | None = None, out_of: str | None = None, limit: int = COPY_BYTES
    ) -> None:
        """Extract a tar archive ``into`` a folder, which is made if it is missing, or archive a folder.

        Exactly one of ``into`` and ``out_of`` is given; names in the archive are relative to it. An archive
        is not compressed. Raises FileNotFoundError without the folder ``out_of``, FilesTooLargeError if its
        archive has more than ``limit`` bytes, and ToolServerError.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End and remove it with all that runs in it. Idempotent; also after a ``start`` that failed."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self.stop())


def back_end_away(name: str, message: str, *, hint: str | None = None) -> ToolServerError:
    """Return the error for a back end that is away: a daemon or a service that does not answer."""
    return ToolServerError(message, hint=hint, outage=Dependency(DependencyKind.CONTAINERS, name))


C = TypeVar("C", bound=type[Container])


def _class(extension: Any) -> type[Container]:
    if not (inspect.isclass(extension) and issubclass(extension, Container)):
        raise TypeError("it does not derive from agentrl.worlds.containers.container.Container")
    if missing := sorted(extension.__abstractmethods__):
        raise TypeError(f"it has no method {missing[0]!r}")
    return extension


CONTAINERS: Final[Registry[type[Container]]] = Registry(
    "container back end",
    group="agentrl.containers",
    built_in=(
        "agentrl.worlds.containers.docker",
        "agentrl.worlds.containers.kubernetes",
        "agentrl.worlds.sandbox.container",
    ),
    convert=_class,
)


def container(name: str) -> Callable[[C], C]:
    """Return a decorator that registers a class as the back end ``name``."""

    def decorate(extension: C) -> C:
        CONTAINERS.add(_class(extension), name)
        return extension

    return decorate
