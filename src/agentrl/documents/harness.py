"""HarnessRun: what the command line of one trajectory did, as its Record shows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentrl.documents.base import Document


class Ending(StrEnum):
    """How a harness, or the command that scores it, ended."""

    EXITED = "exited"  # by itself, with exit code 0
    NONZERO_EXIT = "nonzero_exit"  # by itself, with another exit code
    KILLED = "killed"  # by a signal that AgentRL did not send, also one that a shell reports as 128 + n
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    DISK_LIMIT = "disk_limit"  # its files reached limits.disk_mb or limits.files
    OUTPUT_LIMIT = "output_limit"
    NO_CALLS = "no_calls"  # it ended with exit code 0 and has made no model call


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRun(Document):
    """One command that ran in the working directory of a trajectory."""

    ended: Ending
    exit_code: int
    """Minus the number of the signal that ended it."""
    seconds: float
    memory_mb: float
    """Largest memory seen."""
    stdout: str = ""
    """The first and the last bytes of standard output."""
    stderr: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRun(Document):
    """The harness of one trajectory, what it changed, and the command that scored it."""

    run: CommandRun
    changed_files: tuple[str, ...] = ()
    """The first files of the working directory that differ from its beginning."""
    changes: int = 0
    """How many files differ."""
    diff: str = ""
    """A unified diff of the changed text files, cut at a limit."""
    scoring: CommandRun | None = None
    """The command that scored it; None without one."""
