"""Define the limits of one program in the sandbox, and the result of running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from agentrl.errors import ConfigError

Isolation = Literal["auto", "namespaces", "limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one program may use. A program that exceeds a limit is killed with all that it started."""

    seconds: float = 10.0
    """Time by the clock."""
    cpu_seconds: int = 10
    """CPU time of each process."""
    memory_mb: int = 512
    """Memory of all its processes, and the address space of each."""
    processes: int = 32
    """Processes and threads at a time."""
    disk_mb: int = 64
    """Size of the files in its directory."""
    files: int = 2048
    """Number of the files in its directory."""
    open_files: int = 64
    """Open files of each process."""
    output_bytes: int = 65536
    """Standard output and standard error, each."""

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Self:
        """Return the limits in ``config``; other keys are ignored. Raises ConfigError."""
        known = {item.name for item in dataclasses.fields(cls)}
        chosen = {name: value for name, value in config.items() if name in known}
        for name, value in chosen.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ConfigError(f"{where}: {name} is {value!r}", hint="give a number above 0")
            if name != "seconds" and value != int(value):
                raise ConfigError(f"{where}: {name} is {value!r}", hint="give a whole number")
        return cls(**{name: value if name == "seconds" else int(value) for name, value in chosen.items()})


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
