"""Record: one attempt at one trajectory, with what its harness did. Label: what a person says of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from agentrl.documents.base import Document, Root, is_finite, now
from agentrl.documents.gateway import ReportedReward
from agentrl.documents.model_call import PartialGeneration
from agentrl.documents.status import RecordStatus, StopReason, shown_status
from agentrl.errors import ConfigError


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
    """What a trajectory did to its files: its harness, what changed, and the command that scored it."""

    run: CommandRun | None
    """The harness; None of an agent that worked through the tools of its environment."""
    changed_files: tuple[str, ...] = ()
    """The first files of the working directory that differ from its beginning."""
    changes: int = 0
    """How many files differ."""
    diff: str = ""
    """A unified diff of the changed text files, cut at a limit."""
    scoring: CommandRun | None = None
    """The command that scored it; None without one."""
    files: dict[str, str] = field(default_factory=dict)
    """Text files that it and its scoring left, by their path, each cut at a limit."""


TURN_REWARDS = "turn_rewards"
"""The key of ``score_details`` with a reward for each model call."""
ROLE_REWARDS = "role_rewards"
"""The key of ``score_details`` with the rewards of roles, {role: reward}."""
CALL_ROLES = "call_roles"
"""The key of ``score_details`` with the role of each model call, if roles have rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Document):
    """Why an attempt failed; ``kind`` is engine, tool, harness, scorer, timeout, trajectory or internal."""

    kind: str
    message: str
    at: datetime = field(default_factory=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Root):
    """One attempt at one trajectory.

    A scored Record has a score, a failed one a failure, and a released one neither. ``min_version`` and
    ``max_version`` are the lowest and highest policy version of the generated tokens.
    """

    id: str
    task: str
    traj_id: int
    attempt: int
    split: str
    epoch: int
    status: RecordStatus = RecordStatus.CREATED
    query: str
    answer: Any = None
    final_answer: str | None = None
    score: float | None = None
    score_details: dict[str, Any] = field(default_factory=dict)
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    unscored_because: Failure | None = None
    """Why the last attempt to score it failed; it waits for the next attempt."""
    abandoned_because: str | None = None
    advantage: float | None = None
    """The advantage of the score, for all model calls."""
    turn_advantages: tuple[float, ...] = ()
    """What each model call's own reward, or that of its role, adds to it; empty without such rewards."""
    tool_rewards: dict[str, Any] = field(default_factory=dict)
    """``{tool: {"calls": [reward of each call], "state": reward of its state}}``, of tools that give any.

    Of an environment also ``roles``, and ``details`` for those of the score.
    """
    agent_score: dict[str, Any] | None = None
    """``{score, details, turn_rewards, role_rewards}`` of an agent that scores its own trajectories."""
    turns: int = 0
    tool_calls: int = 0
    context_resets: int = 0
    """Contexts that a context manager started. Prompts that drop earlier thoughts are not counted."""
    prompt_tokens: int = 0
    """Tokens of the last model call's prompt."""
    input_tokens: int = 0
    """Tokens of the prompts of all model calls."""
    cached_tokens: int = 0
    """Tokens of these prompts that the engines had in their prefix caches."""
    generated_tokens: int = 0
    min_version: int | None = None
    max_version: int | None = None
    owner: str | None = None
    partial: PartialGeneration | None = None
    """The tokens of a released Record's unfinished model call; the next attempt resumes it."""
    train_rule: str | None = None
    """Which branches of a gateway's trajectory are trained: main, agent, all, or module:function."""
    untrained_calls: tuple[int, ...] = ()
    """Indexes of the model calls that ``train_rule`` leaves out."""
    reported_reward: ReportedReward | None = None
    """The reward that the agent reported through its gateway; at the end it becomes ``agent_score``."""
    harness: HarnessRun | None = None
    """What the harness of the agent ``command``, or the tests of a container, left; None without one."""
    trace_id: str | None = None
    """The OpenTelemetry trace of this attempt, in hexadecimal digits; None if it was not traced."""
    traj: tuple[str, ...] = ()
    """``_id`` of each model call, in order."""
    trained_count: int = 0
    last_trained_step: int | None = None
    created_at: datetime = field(default_factory=now)
    completed_at: datetime | None = None
    scored_at: datetime | None = None
    score_history: tuple[dict[str, Any], ...] = ()
    """``{score, details, scored_at}`` of each score that ``agentrl db rescore`` replaced, oldest first."""
    rescored: dict[str, Any] | None = None
    """``{score, details, at}`` of a new score that came after the Record had been trained."""
    pruned_at: datetime | None = None
    """When ``agentrl db prune`` deleted its model calls and training data."""
    checksums: dict[str, str] = field(default_factory=dict, compare=False)
    """See ``store.mechanics.blobs``."""

    @property
    def shown_status(self) -> str:
        """The status that people read: ``trained`` in place of ``ready`` once a step trained it."""
        return shown_status(self.status, self.trained_count)

    @property
    def first_scored_at(self) -> datetime | None:
        """When the first score was written; a later rescoring does not count."""
        earlier = self.score_history[0].get("scored_at") if self.score_history else None
        return earlier if isinstance(earlier, datetime) else self.scored_at

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Return the reward of each model call; empty if neither the scorer nor a tool gave one."""
        stored = self.score_details.get(TURN_REWARDS)
        values = stored if isinstance(stored, (list, tuple)) else ()
        return tuple(float(value) if is_finite(value) else 0.0 for value in values)

    @property
    def role_rewards(self) -> dict[str, float]:
        """Return the rewards of roles; empty without any."""
        stored = self.score_details.get(ROLE_REWARDS)
        values = stored if isinstance(stored, dict) else {}
        return {role: float(value) for role, value in values.items() if is_finite(value)}

    @property
    def call_roles(self) -> tuple[str | None, ...]:
        """Return the role of each model call; empty if no role has a reward."""
        stored = self.score_details.get(CALL_ROLES)
        return tuple(stored) if isinstance(stored, (list, tuple)) else ()


MAX_LABEL: Final = 64
MAX_NOTE: Final = 4000
MAX_NAME: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Label(Root):
    """One person's label of one Record. ``id`` is ``record_id@by``: a person has one label per trajectory."""

    id: str
    record: str
    by: str
    """The name that the person gave."""
    written_by: str | None = None
    """Who wrote it by authentication: the user and host of the dashboard, and the database user."""
    label: str
    """A word to filter by, such as ``wrong`` or ``cheats``."""
    note: str = ""
    score: float | None = None
    """The score that the trajectory deserves; ``agentrl db rescore --from-labels`` applies it."""
    created_at: datetime = field(default_factory=now)
    updated_at: datetime = field(default_factory=now)


def label_key(record_id: str, by: str) -> str:
    """Return the ``_id`` of a person's label of a Record."""
    return f"{record_id}@{by}"


def check_label(*, label: str, note: str, by: str, score: float | None) -> None:
    """Raise ConfigError for a text that is missing or too long, or a score that is not finite."""
    for what, text, shortest, longest in (
        ("label", label, 1, MAX_LABEL), ("note", note, 0, MAX_NOTE), ("name", by, 1, MAX_NAME)
    ):  # fmt: skip
        if not shortest <= len(text) <= longest:
            raise ConfigError(
                f"the {what} has {len(text)} characters", hint=f"give {shortest} to {longest} characters"
            )
    if score is not None and not math.isfinite(score):
        raise ConfigError(f"the score is {score}", hint="give a finite number, or none")
