"""The errors that AgentRL raises on purpose; any other exception that ends a process is a bug.

AgentRLError
├── ConfigError                 a flag, YAML key or configuration file is wrong
├── TaskFileError               a task file cannot be read
├── ModelError                  a model folder cannot be used
├── StoreError                  the database refused an operation or cannot be reached
│   ├── StoreUnavailableError   the server does not answer; the same call may succeed later
│   ├── StoreDeniedError        the server refuses this user; a retry does not help
│   ├── LeaseHeldError          another process holds the lease
│   └── LeaseLostError          the lease behind a write has expired
├── ForestError                 training data are not a token forest
├── PublishError                weights could not be written or do not match their checksums
├── TrainingError               no data came in time, or the loss is not finite
└── FailureError                ends one trajectory; ``kind`` says what failed
    ├── EngineError             the inference engine failed
    ├── ToolServerError         a tool server cannot be reached (a tool may return errors)
    ├── ScorerError             the scorer raised
    ├── TrajectoryError         the conversation cannot be continued
    └── GroupError              a group filter or an advantage estimator failed; it ends a group
"""

from __future__ import annotations

from typing import ClassVar


class AgentRLError(Exception):
    """An error with a message for the user: what is wrong, and in ``hint`` how to fix it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.hint}" if self.hint else self.message


class ConfigError(AgentRLError):
    """A flag, YAML key or configuration file is wrong."""

    exit_code = 2


class TaskFileError(AgentRLError):
    """A task file cannot be read, or has invalid lines."""

    exit_code = 2


class ModelError(AgentRLError):
    """A model folder is missing, incomplete, or of a kind that cannot be used."""

    exit_code = 2


class StoreError(AgentRLError):
    """The database refused an operation or cannot be reached."""


class StoreUnavailableError(StoreError):
    """The database server does not answer; it may be restarting. The same call may succeed later."""


class LeaseHeldError(StoreError):
    """Another process holds the lease, and it has not expired."""


class StoreDeniedError(StoreError):
    """The database refuses this user, or refuses the operation to this user."""


class LeaseLostError(StoreError):
    """The lease behind a write has expired or has another owner; nothing was written."""


class ForestError(AgentRLError):
    """The tokens, nodes and spans of training data do not form a token forest."""


class PublishError(AgentRLError):
    """Weights could not be written, or do not match their manifest."""


class TrainingError(AgentRLError):
    """Training cannot continue: no data came in time, or the loss is not finite."""


class FailureError(AgentRLError):
    """Ends one trajectory attempt; ``kind`` becomes ``Record.failure.kind``."""

    kind: ClassVar[str] = "internal"


class EngineError(FailureError):
    """The inference engine refused a request, failed, or ended."""

    kind = "engine"


class ToolServerError(FailureError):
    """A tool server cannot be reached or stopped answering."""

    kind = "tool"


class ScorerError(FailureError):
    """The scorer raised, timed out or returned no number."""

    kind = "scorer"


class TrajectoryError(FailureError):
    """The conversation cannot be continued: the template or the context manager broke an invariant."""

    kind = "trajectory"


class GroupError(FailureError):
    """A group filter or an advantage estimator raised, hung or returned a malformed result.

    The group is not trained.
    """

    kind = "group"
