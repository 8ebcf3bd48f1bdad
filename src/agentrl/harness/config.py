"""Read the YAML file that describes a harness: its command, working directory, limits and score."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag, ValidationInfo

from agentrl.containers.base import ContainerSpec
from agentrl.documents.record import Ending
from agentrl.settings_file import read_settings
from agentrl.tools.sandbox.limits import SandboxLimits
from agentrl.tools.sandbox.namespaces import WORK
from agentrl.validation import BesideFile, PlainText, Positive, PositiveWhole, Settings, Text, wrong

_RESERVED: Final = "AGENTRL_"
CONTAINER_USER: Final = "1000:1000"
_SPARE_SECONDS: Final = 1800.0
"""Time that a container outlives its command, for copies."""


def _command(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return tuple(value)
    raise wrong("a line for the shell, or a list of words")


def _variable(name: str) -> str:
    if not name.isidentifier() or name.startswith(_RESERVED):
        raise wrong(f"named by letters, none with {_RESERVED}")
    return name


def _below(name: str) -> str:
    if name.startswith("/") or ".." in Path(name).parts:
        raise wrong("named by a path below the working directory, or below ~/")
    return name


def _failing(ending: Ending) -> Ending:
    if ending is Ending.EXITED:
        raise wrong("a failure")
    return ending


def _folders(paths: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    """Return absolute paths; leave out a path with a variable that is not set."""
    expanded = [os.path.expanduser(os.path.expandvars(path)) for path in paths]
    return tuple(str((info.context or Path()) / path) for path in expanded if "$" not in path)


def _network(name: str) -> str:
    if name == "none":
        raise wrong("a network in which the gateway is reachable")
    return name


def _shape(value: Any) -> str | None:
    """Return the tag of a word, or of a mapping with exactly one of ``file`` and ``command``."""
    if isinstance(value, str):
        return "<word>"
    named = [name for name in ("file", "command") if isinstance(value, dict) and name in value]
    return f"<{named[0]}>" if len(named) == 1 else None


def _one_of(expected: str) -> Discriminator:
    return Discriminator(
        _shape, custom_error_type="wrong_value", custom_error_message="wrong",
        custom_error_context={"expected": expected},
    )  # fmt: skip


TASK: Final = "task"
"""``isolation`` of a harness that runs in the container of its task."""
Command = Annotated[str | tuple[str, ...], BeforeValidator(_command)]
Variable = Annotated[str, AfterValidator(_variable)]
Below = Annotated[str, AfterValidator(_below)]
Folders = Annotated[tuple[Text, ...], AfterValidator(_folders)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessLimits(SandboxLimits):
    """What a harness may use."""

    seconds: Positive = 1800.0
    cpu_seconds: PositiveWhole = 1800
    memory_mb: PositiveWhole = 4096
    processes: PositiveWhole = 256
    disk_mb: PositiveWhole = 1024
    files: PositiveWhole = 65536
    open_files: PositiveWhole = 1024
    output_bytes: PositiveWhole = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace(Settings):
    """What the working directory begins with: the files of a folder, or of a commit in a Git bundle."""

    template: BesideFile | None = None
    bundle: BesideFile | None = None
    ref: Text | None = None

    def __post_init__(self) -> None:
        if self.template is not None and self.bundle is not None:
            raise wrong("a template or a bundle, not both")
        if self.template is not None and not self.template.is_dir():
            raise wrong("an existing folder, relative to this file", "template")
        if self.bundle is not None and not self.bundle.is_file():
            raise wrong("an existing file, relative to this file", "bundle")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessFile(Settings):
    """A file that the harness writes into the working directory."""

    file: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCommand(Settings):
    """A command that scores the working directory, such as its tests."""

    command: Command
    restore: tuple[Text, ...] = ()
    """Files and folders that are put back as they were, so that the harness cannot have changed them."""
    seconds: Positive = 120.0
    result: Literal["exit_code", "stdout"] = "exit_code"
    """``exit_code``: 1 if it is 0, else 0. ``stdout``: the number on the last line."""


Score = Annotated[
    Annotated[Literal["scorer", "exit_code", "reward"], Tag("<word>")]
    | Annotated[HarnessFile, Tag("<file>")]
    | Annotated[ScoreCommand, Tag("<command>")],
    _one_of("scorer, exit_code, reward, {file: PATH} or {command: …}"),
]
Answer = Annotated[
    Annotated[Literal["message", "stdout"], Tag("<word>")] | Annotated[HarnessFile, Tag("<file>")],
    _one_of("message, stdout or {file: PATH}"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessConfig(Settings):
    """The description of a harness. Folders and files are absolute."""

    command: Command
    workspace: Workspace = field(default_factory=Workspace)
    environment: Mapping[Variable, PlainText] = field(default_factory=dict)
    pass_environment: tuple[Variable, ...] = ()
    files: Mapping[Below, PlainText] = field(default_factory=dict)
    path: Folders = ()
    visible: Folders = ()
    isolation: Text = "auto"
    """``auto``, ``namespaces``, ``limits``, the name of a container back end, or ``task``: the container that
    a Harbor task brings."""
    image: Text | None = None
    rootfs: BesideFile | None = None
    container: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the container back end."""
    network: Annotated[Text, AfterValidator(_network)] = "gateway"
    """``gateway``, ``host``, or another one that the container back end knows."""
    limits: HarnessLimits = field(default_factory=HarnessLimits)
    score: Score = "scorer"
    answer: Answer = "message"
    fail_on: frozenset[Annotated[Ending, AfterValidator(_failing)]] | None = None
    """Endings that fail the attempt; None: those ``failing``, and each bad one without a model call."""
    train: Text = "main"
    source: Path
    """The file itself."""

    def __post_init__(self) -> None:
        if self.in_container or self.isolation == TASK:
            for name in ("path", "visible"):
                if getattr(self, name):
                    raise wrong("left out with a container: put programs into the image", name)
        if self.isolation == TASK:
            if self.workspace != Workspace():
                raise wrong("left out with isolation: task, which has the task's files", "workspace")
            if self.score != "scorer":
                raise wrong("scorer with isolation: task, whose tests give the score", "score")
            if isinstance(self.answer, HarnessFile):
                raise wrong("message or stdout with isolation: task", "answer")
        if self.in_container:
            return
        for name in ("image", "rootfs", "container"):
            if getattr(self, name):
                raise wrong(f"left out with isolation: {self.isolation}, which starts no container", name)
        if self.network not in ("gateway", "host"):
            raise wrong("gateway or host", "network")

    @property
    def in_container(self) -> bool:
        """Return whether commands run in containers of their own."""
        return self.isolation not in ("auto", "namespaces", "limits", TASK)

    def container_spec(self, *, network: str, gateway: tuple[str, int] | None = None) -> ContainerSpec:
        """Return what the container of one command is made of."""
        limits = self.limits
        return ContainerSpec(
            name="harness", image=self.image, rootfs=None if self.rootfs is None else str(self.rootfs),
            user=CONTAINER_USER, writable=(WORK, "/tmp", "/var/tmp"), network=network, gateway=gateway,
            memory_mb=limits.memory_mb, storage_mb=limits.disk_mb, files=limits.files,
            processes=limits.processes, open_files=limits.open_files, cpu_seconds=limits.cpu_seconds,
            seconds=limits.seconds + _SPARE_SECONDS, options=self.container,
        )  # fmt: skip

    @property
    def failing(self) -> frozenset[Ending]:
        """Return the endings that fail the attempt: by default all bad ones that leave nothing to score.

        A model that can end its harness could otherwise avoid the 0 of an exit code or of tests.
        """
        if self.fail_on is not None:
            return self.fail_on
        if isinstance(self.score, ScoreCommand) or self.isolation == TASK:
            return frozenset({Ending.NO_CALLS})
        scored = {Ending.NONZERO_EXIT, Ending.KILLED} if self.score == "exit_code" else set()
        return frozenset(Ending) - {Ending.EXITED, *scored}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the harness of a YAML file. Raises ConfigError with the key, its value and the fix."""
        file = read_settings(path.resolve(), hint="docs/harnesses.md lists the keys of a harness's YAML file")
        return file.check(cls, file.content, source=file.path)
