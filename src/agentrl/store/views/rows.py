"""The rows of the audit views, whose field names are those that Compass shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentrl.documents.base import Root
from agentrl.documents.record import Failure
from agentrl.documents.status import (
    DataStatus,
    RecordStatus,
    ServiceStatus,
    StepStatus,
    StopReason,
    TaskStatus,
    shown_status,
)
from agentrl.documents.task import task_key


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow(Root):
    """One row of ``audit_trajectories``: one attempt at a trajectory, and its training."""

    id: str
    split: str
    epoch: int
    task: str
    traj_id: int
    attempt: int
    status: RecordStatus
    query: str
    answer: Any = None
    final_answer: str | None = None
    score: float | None = None
    advantage: float | None = None
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    abandoned_because: str | None = None
    turns: int = 0
    tool_calls: int = 0
    context_resets: int = 0
    prompt_tokens: int = 0
    """Tokens of the last call's prompt."""
    generated_tokens: int = 0
    min_version: int | None = None
    max_version: int | None = None
    training_status: DataStatus | None = None
    quarantined_because: str | None = None
    trained_at_steps: tuple[int, ...] = ()
    staleness: int | None = None
    """Optimizer steps between its oldest token and the last step that trained it."""
    tokens: int | None = None
    trainable_tokens: int | None = None
    seconds: float | None = None
    """From the claim to the score."""
    trained_count: int = 0
    last_trained_step: int | None = None
    owner: str | None = None
    created_at: datetime
    scored_at: datetime | None = None
    pruned_at: datetime | None = None

    @property
    def shown_status(self) -> str:
        """The status that people read: ``trained`` in place of ``ready`` once a step trained it."""
        return shown_status(self.status, self.trained_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow(Root):
    """One row of ``audit_groups``: one Task of one epoch with the scores of its trajectories."""

    id: str
    split: str
    epoch: int
    order: int
    task_id: str
    status: TaskStatus
    query: str
    answer: Any = None
    slots: int
    attempts: int
    scores: tuple[float, ...]
    agreement: str
    mean_score: float | None = None
    scored: int | None = None
    failed: int | None = None
    outcome: str | None = None
    trained: int | None = None
    finalized_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow(Root):
    """One row of ``audit_tasks``: one question over the epochs in which its group is completed."""

    id: str
    split: str
    task_id: str
    query: str
    answer: Any = None
    epochs: tuple[int, ...]
    mean_scores: tuple[float | None, ...]
    """In the order of ``epochs``."""
    best_score: float | None = None
    lowest_score: float | None = None
    scored: int = 0
    failed: int = 0
    mixed: int = 0
    """Groups whose scores differ; only these can be trained."""
    change: float | None = None
    """Mean score of the last epoch with a score minus that of the first."""
    always_wrong: bool = False

    @property
    def last(self) -> str:
        """``_id`` of the Task of its last epoch."""
        return task_key(self.split, self.epochs[-1], self.task_id)

    @property
    def known(self) -> list[float]:
        """The mean scores of the epochs with a score."""
        return [value for value in self.mean_scores if value is not None]

    @property
    def mean(self) -> float | None:
        """The mean over the epochs; None without a score."""
        known = self.known
        return sum(known) / len(known) if known else None

    @property
    def agreement(self) -> str:
        """``always agrees``, ``never agrees``, ``sometimes agrees``, or ``no scores``."""
        groups = len(self.known)
        if not groups:
            return "no scores"
        if self.mixed == 0:
            return "always agrees"
        return "never agrees" if self.mixed == groups else "sometimes agrees"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow(Root):
    """One row of ``audit_steps``: one optimizer step."""

    id: str
    step: int
    status: StepStatus
    policy_version: int
    reward: float | None = None
    pass_rate: float | None = None
    loss: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    trajectories: int
    groups: int
    tokens: int | None = None
    trainable_tokens: int | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    seconds: float | None = None
    """From the plan to the commit."""
    seconds_waiting_for_data: float | None = None
    owner: str
    inherited: bool = False
    """``TrainStep.inherited``."""
    planned_at: datetime
    committed_at: datetime | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    def metric(self, name: str) -> float | None:
        """Return a metric that is a finite number; None without it."""
        value = self.metrics.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow(Root):
    """One row of ``audit_engines``: one engine, the version that it serves, and its speed."""

    id: str
    url: str
    engine: str
    model: str
    status: ServiceStatus
    policy_version: int | None = None
    newest_version: int | None = None
    versions_behind: int | None = None
    recent_calls: int = 0
    seconds_per_call: float | None = None
    slowest_seconds: float | None = None
    tokens_per_second: float | None = None
    prefix_cache_hit_rate: float | None = None
    last_call_at: datetime | None = None
    seconds_since_heartbeat: float | None = None
    running_requests: int = 0
    running_tokens: int = 0
    context_length: int | None = None
    detail: str | None = None
    host: str
    pid: int
    started_at: datetime
    heartbeat: datetime
