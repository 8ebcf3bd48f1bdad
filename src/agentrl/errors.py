"""Every error that AgentRL raises on purpose; anything else that escapes is a bug.

AgentRLError
├── ConfigError            a flag, YAML key or configuration file is wrong
├── TaskFileError          a task file cannot be read
├── ModelError             a model folder cannot be used
├── StoreError             the database refused or cannot be reached
│   ├── StoreUnavailableError     it does not answer now; the same call may succeed later
│   ├── LeaseHeldError     another process holds the lease
│   ├── StoreDeniedError   it refuses this user: no retry helps
│   └── LeaseLostError     the claim that a write relied on has expired
├── ForestError            training data are no token forest
├── PublishError           weights could not be written or do not match their checksums
├── TrainingError          no data came in time, or the loss is no longer finite
└── FailureError           what can end one trajectory; it carries a ``FailureKind``
    ├── EngineError        the inference engine failed
    ├── ToolServerError    a tool server cannot be reached (a tool's own error is no failure)
    ├── ScorerError        the scorer raised
    ├── TrajectoryError    the conversation itself cannot go on
    └── GroupError         a group filter or an advantage estimator failed; it ends a group
"""

from __future__ import annotations

from typing import ClassVar


class AgentRLError(Exception):
    """An error whose message is meant for a person: what is wrong, and ``hint``, what mends it."""

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
    """A task file cannot be read, or holds lines that are no tasks."""

    exit_code = 2


class ModelError(AgentRLError):
    """A model folder is missing, incomplete, or of a kind that cannot be used."""

    exit_code = 2


class StoreError(AgentRLError):
    """The database refused an operation or cannot be reached."""


class StoreUnavailableError(StoreError):
    """The database does not answer: it may be restarting. The same call may succeed later."""


class LeaseHeldError(StoreError):
    """Another process holds the lease, and it has not expired."""


class StoreDeniedError(StoreError):
    """The database refuses this user, or what the user wants to do."""


class LeaseLostError(StoreError):
    """The lease behind a write has expired or passed to another owner; the write did not happen."""


class ForestError(AgentRLError):
    """Training data whose tokens, nodes and spans do not make a token forest."""


class PublishError(AgentRLError):
    """Weights could not be written, or do not match their manifest."""


class TrainingError(AgentRLError):
    """Training cannot go on: no data came in time, or the loss is no longer finite."""


class FailureError(AgentRLError):
    """Ends one trajectory attempt; ``kind`` becomes ``Record.failure.kind``."""

    kind: ClassVar[str] = "internal"


class EngineError(FailureError):
    """The inference engine refused a request, failed, or went away."""

    kind = "engine"


class ToolServerError(FailureError):
    """A tool server cannot be reached or stopped answering."""

    kind = "tool"


class ScorerError(FailureError):
    """The scorer raised, timed out or returned no number."""

    kind = "scorer"


class TrajectoryError(FailureError):
    """The conversation cannot go on: the template or the context manager broke an invariant."""

    kind = "trajectory"


class GroupError(FailureError):
    """A group filter or an advantage estimator raised, hung or returned a malformed result.

    The group is not trained.
    """

    kind = "group"
