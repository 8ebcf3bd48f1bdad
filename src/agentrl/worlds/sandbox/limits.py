"""Define the limits of one program in the sandbox, and the result of running it."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from agentrl.base.user_code import call_name
from agentrl.base.validation import Positive, PositiveWhole, SettingsModel, Text, read_config
from agentrl.documents.record import CommandRun, Ending

_ENDINGS: Final = {
    "time": Ending.TIME_LIMIT, "memory": Ending.MEMORY_LIMIT, "files": Ending.DISK_LIMIT,
    "output": Ending.OUTPUT_LIMIT,
}  # fmt: skip
_SHELL_SIGNAL: Final = 128

Isolation = Literal["auto", "namespaces", "limits", "docker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits(SettingsModel):
    """What one program may use. A program that exceeds a limit is killed with all that it started."""

    seconds: Positive = 10.0
    """Time by the clock."""
    cpu_seconds: PositiveWhole = 10
    """CPU time of each process."""
    memory_mb: PositiveWhole = 512
    """Memory of all its processes, and the address space of each."""
    processes: PositiveWhole = 32
    """Processes and threads at a time."""
    disk_mb: PositiveWhole = 64
    """Size of the files in its directory."""
    files: PositiveWhole = 2048
    """Number of the files in its directory."""
    open_files: PositiveWhole = 64
    """Open files of each process."""
    output_bytes: PositiveWhole = 65536
    """Standard output and standard error, each."""

    def as_dict(self) -> dict[str, Any]:
        """Return these limits by name, without what a subclass adds."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(SandboxLimits)}


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
