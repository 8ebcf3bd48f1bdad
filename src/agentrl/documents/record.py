"""Record: one attempt at one trajectory of one Task."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentrl.documents.base import Document, Root, now
from agentrl.documents.gateway import ReportedReward
from agentrl.documents.harness import HarnessRun
from agentrl.documents.partial import PartialGeneration
from agentrl.documents.sanitize_bson import is_finite
from agentrl.documents.status import RecordStatus, StopReason, shown_status

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
    """``{tool: {"calls": [reward of each call], "state": reward of its state}}``, of tools that give any."""
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
    """What the harness of the agent ``command`` did; None without one."""
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
    """See ``store.checksums``."""

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
        return tuple(float(value) if _is_finite(value) else 0.0 for value in values)

    @property
    def role_rewards(self) -> dict[str, float]:
        """Return the rewards of roles; empty without any."""
        stored = self.score_details.get(ROLE_REWARDS)
        values = stored if isinstance(stored, dict) else {}
        return {role: float(value) for role, value in values.items() if _is_finite(value)}

    @property
    def call_roles(self) -> tuple[str | None, ...]:
        """Return the role of each model call; empty if no role has a reward."""
        stored = self.score_details.get(CALL_ROLES)
        return tuple(stored) if isinstance(stored, (list, tuple)) else ()


def _is_finite(value: Any) -> bool:
    return is_finite(value)
