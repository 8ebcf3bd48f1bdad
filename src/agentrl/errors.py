"""The errors that AgentRL raises on purpose; any other exception that ends a process is a bug.

AgentRLError
├── ConfigError                 a flag, YAML key or configuration file is wrong
├── TaskFileError               a task file cannot be read
├── ModelError                  a model folder cannot be used
├── StoreError                  the database refused an operation or cannot be reached
│   ├── StoreUnavailableError   the server does not answer; the same call may succeed later
│   ├── StoreDeniedError        the server refuses this user; a retry does not help
│   ├── RunMissingError         the server has no such run
│   ├── SchemaVersionError      another AgentRL wrote the run
│   ├── LeaseHeldError          another process holds the lease
│   └── LeaseLostError          the lease behind a write has expired
├── ColumnError                 a column can never have its values, however often it is tried
├── ForestError                 training data are not a token forest
├── PublishError                weights could not be written or do not match their checksums
├── TrainingError               no data came in time, or the loss is not finite
├── TimeLimitError              a time limit ended the run before its last step
├── CostLimitError              the run has cost ``--max_cost``
└── FailureError                ends one attempt at a trajectory; ``kind`` says what failed. With ``outage``
    │                           it ends none: it names what is down, and the call is repeated later
    ├── EngineError             the inference engine failed
    ├── ToolServerError         a tool server cannot be reached (a tool may return errors)
    │   └── ToolServerConfigError   it cannot be used as it is configured: no such command, a refused login
    ├── TaskEnvironmentError    an environment raised or took too long
    ├── HarnessError            a harness ended in a way that fails its attempt, or gave no score
    ├── OutageError             what a tool, an environment or a scorer of your own reaches is down
    │   ├── SessionLostError        it was down, and has lost the trajectory's state
    │   └── ServerFullError         it is up, and has no free session
    ├── ScorerError             the scorer raised
    ├── TrajectoryError         the conversation cannot be continued
    │   └── ImageError              an image cannot be read, is too large, or the model reads text only
    └── GroupError              a group filter or an advantage estimator failed; it ends a group
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class DependencyKind(StrEnum):
    """A kind of service that trajectories depend on."""

    ENGINE = "engine"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    CONTAINERS = "containers"
    JUDGE = "judge"
    TEACHER = "teacher"
    DATABASE = "database"


@dataclass(frozen=True, slots=True)
class Dependency:
    """One service that trajectories need: the engines, a tool server, an environment, a judge, a teacher.

    ``name`` is the tool server's name as in a task's ``tools``, the address of the environment's server or
    the environment's name, the judge's model, or the teacher's address or folder; the engines of a run and
    its database have none.
    """

    kind: DependencyKind
    name: str = ""

    def __str__(self) -> str:
        return _PHRASES[self.kind].format(self.name)


_PHRASES = {
    DependencyKind.ENGINE: "the engines",
    DependencyKind.TOOL: "tool server {}",
    DependencyKind.ENVIRONMENT: "environment {}",
    DependencyKind.CONTAINERS: "the containers of {}",
    DependencyKind.JUDGE: "judge {}",
    DependencyKind.TEACHER: "teacher {}",
    DependencyKind.DATABASE: "the database",
}
ENGINES = Dependency(DependencyKind.ENGINE)
DATABASE = Dependency(DependencyKind.DATABASE)


def tool_server(name: str) -> Dependency:
    """Return the dependency on one tool server."""
    return Dependency(DependencyKind.TOOL, name)


def judge(model: str) -> Dependency:
    """Return the dependency on one judge model."""
    return Dependency(DependencyKind.JUDGE, model)


class AgentRLError(Exception):
    """An error with a message for the user: what is wrong, and in ``hint`` how to fix it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.hint}" if self.hint else self.message


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has none."""
    # Fall back to the type: asyncio's TimeoutError, for one, has no text.
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_ABBREVIATED = 4
"""Letters of the longest word that may be an abbreviation."""


def nearest(name: object, known: Iterable[object]) -> str | None:
    """Return the hint that names the known name nearest to a misspelt one; None if none is near."""
    # Import it here: every process imports this module, and few ever name a near word.
    import difflib

    word, names = str(name), [str(each) for each in known]
    found = difflib.get_close_matches(word, names, n=1)
    if not found and 2 <= len(word) <= _ABBREVIATED:  # rn: rename
        found = [each for each in names if re.match(".*".join(map(re.escape, word)), each)]
    return f"did you mean {found[0]!r}?" if found else None


def quoted(value: object) -> str:
    """Return a value as one word of a shell command, for a hint that a user pastes."""
    return shlex.quote(str(value))


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return the hint for an unknown name: the nearest known one, else all of them."""
    names = list(map(str, known))
    return nearest(name, names) or f"choose one of {', '.join(names)}"


Place = tuple[str | int, ...]
"""The keys and list indexes that lead to a value of a file."""


def dotted(place: Place) -> str:
    """Return a place as errors show it, such as ``servers.calc.args[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


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


class RunMissingError(StoreError):
    """The server has no run of this name."""


class SchemaVersionError(StoreError):
    """The run has a schema version that this code does not read."""


class LeaseLostError(StoreError):
    """The lease behind a write has expired or has another owner; nothing was written."""


class ColumnError(AgentRLError):
    """A column can never have its values: it is given up at once, and its Record is abandoned by name."""


class ForestError(AgentRLError):
    """The tokens, nodes and spans of training data do not form a token forest."""


class PublishError(AgentRLError):
    """Weights could not be written, or do not match their manifest."""


class TrainingError(AgentRLError):
    """Training cannot continue: no data came in time, or the loss is not finite."""


class TimeLimitError(AgentRLError):
    """A time limit ended the run before its last step. What was trained is saved."""

    exit_code = 4


class CostLimitError(AgentRLError):
    """The run has cost what it may. Sampled work is released, and goes on under a higher ``--max_cost``."""

    exit_code = 5


class FailureError(AgentRLError):
    """Ends one trajectory attempt; ``kind`` becomes ``Record.failure.kind``.

    An error with ``outage`` belongs to no trajectory: the dependency is down, refuses everybody or answers
    nonsense (a connection refused, a time-out, a 5xx, a 429, a login page instead of JSON). No attempt is
    used up: the call is repeated when the dependency is back. Raise it only if the call may be repeated.
    ``retry_after`` is the time in seconds for which the dependency asked, as in the header ``Retry-After``.
    """

    kind: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        outage: Dependency | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.outage = outage
        self.retry_after = retry_after


class EngineError(FailureError):
    """The inference engine refused a request, failed, or ended."""

    kind = "engine"


class ToolServerError(FailureError):
    """A tool server cannot be reached or stopped answering."""

    kind = "tool"


class ToolServerConfigError(ToolServerError):
    """A tool server cannot be used as it is configured: no such command, a refused login, a name taken.

    When a process starts, it ends the process. Later it is an outage like any other.
    """

    exit_code = 2


class TaskEnvironmentError(FailureError):
    """The environment of a task raised, took too long or returned a malformed result."""

    kind = "environment"


class HarnessError(FailureError):
    """The command line of a trajectory failed, exceeded a limit or gave no score."""

    kind = "harness"


class OutageError(FailureError):
    """Raise it in a tool, an environment or a scorer of your own if what that reaches is down.

    No attempt is used up: the call is repeated when it is up again, so raise it only if that is allowed.
    ``retry_after`` is the earliest time of a repetition, in seconds from now.
    """

    # Take no outage: whoever calls a user's code knows by which name the run calls what is down.
    def __init__(self, message: str, *, hint: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, hint=hint, retry_after=retry_after)


class SessionLostError(OutageError):
    """Raise it if what an environment or a tool reaches was down and has lost the trajectory's state.

    The call is not repeated: the trajectory is released without an attempt, and goes on in a new session,
    which gets the calls before it again.
    """

    kind = "session"


class ReplayError(FailureError):
    """The state of a trajectory's tools cannot be made again, so that it cannot go on: it begins anew."""

    kind = "replay"


class ServerFullError(OutageError):
    """Raise it if a server is up and has no free session. The call is repeated until there is one.

    ``sessions`` is how many the server says that it has.
    """

    def __init__(self, message: str, *, hint: str | None = None, sessions: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.sessions = sessions


class ScorerError(FailureError):
    """The scorer raised, timed out or returned no number."""

    kind = "scorer"


class TrajectoryError(FailureError):
    """The conversation cannot be continued: the template or the context manager broke an invariant."""

    kind = "trajectory"


class ImageError(TrajectoryError):
    """An image cannot be decoded, is larger than the limits, or the model reads text only."""

    kind = "image"


class ContextFullError(TrajectoryError):
    """No prompt fits into the context any more; the trajectory ends at its length limit."""


class TurnsLimitError(TrajectoryError):
    """The trajectory has made all its model calls; it ends at its turns limit."""


class GroupError(FailureError):
    """A group filter or an advantage estimator raised, hung or returned a malformed result.

    The group is not trained.
    """

    kind = "group"
