"""The statuses of each document and the allowed transitions between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

_State = TypeVar("_State", bound=StrEnum)


class EpochStatus(StrEnum):
    """One epoch of a split."""

    OPENING = "opening"  # its tasks are being inserted; they may already be claimed
    OPEN = "open"  # it has every task; → OPENING when tasks are added later


class TaskStatus(StrEnum):
    """A Task is one group: its slots are the group's generations."""

    CREATED = "created"  # not admitted: its slots may not be claimed yet
    RUNNING = "running"  # admitted: its slots may be claimed; at least one slot is not terminal
    WAITING = "waiting"  # every slot is terminal; the group is not finalized
    COMPLETED = "completed"  # the group is finalized: it has training data, or it was abandoned


class SlotStatus(StrEnum):
    """One generation of a Task."""

    OPEN = "open"  # may be claimed, from ``not_before`` on
    RUNNING = "running"  # claimed, for sampling or scoring; the lease is valid until ``lease_expires_at``
    SAMPLED = "sampled"  # its Record is completed and waits for a score, from ``not_before`` on
    SCORED = "scored"  # terminal: its Record has a score
    FAILED = "failed"  # terminal: ``max_attempts`` attempts, or ``max_scorings`` attempts to score, failed


class RecordStatus(StrEnum):
    """One attempt at a trajectory."""

    CREATED = "created"  # inserted after the claim; no model call yet
    RUNNING = "running"  # its model calls are being written
    COMPLETED = "completed"  # the conversation is complete; it waits for its score
    SCORING = "scoring"  # the scorer is running
    SCORED = "scored"  # it has a score; its group is not finalized
    READY = "ready"  # its group is finalized, and its DBRecordData exists
    ABANDONED = "abandoned"  # its group is finalized without it; the reason is ``abandoned_because``
    FAILED = "failed"  # the attempt failed (``failure``); it has no score
    RELEASED = "released"  # its owner gave it up unfinished: the next one goes on, or begins another


TRAINED = "trained"
"""What people read for a ready Record that a committed step trained."""
SHOWN_STATUSES = tuple(
    shown
    for status in RecordStatus
    for shown in ([status.value, TRAINED] if status == "ready" else [status.value])
)
"""The statuses of Records as people read them: ``ready`` is what no step has trained yet."""


def shown_status(status: RecordStatus, trained_count: int) -> str:
    """Return the status of a Record as every page, table and filter names it."""
    return TRAINED if status is RecordStatus.READY and trained_count else status.value


class ToolState(StrEnum):
    """What a tool keeps between its calls, and so how a trajectory goes on in another process."""

    STATELESS = "stateless"  # nothing, or what a repeated call does not change: stored results are enough
    REPLAY = "replay"  # a session that the same calls build again, with the same results
    SNAPSHOT = "snapshot"  # files, which are kept after each turn that changed them
    OUTSIDE = "outside"  # effects that cannot be taken back: no call is ever made twice


class CallStatus(StrEnum):
    """One model call of a trajectory (DispatchedSamplingTask)."""

    COMPLETED = "completed"
    FORMAT_ERROR = "formaterror"  # a malformed tool call: trainable, advantage 0
    REPEAT_ERROR = "repeaterror"  # the same text twice: trainable, advantage 0
    TOOL_FAILED = "toolfailed"  # a tool returned an error: trainable
    FAILED = "failed"  # the engine failed: not trainable


class DataStatus(StrEnum):
    """Training data made from one Record (DBRecordData)."""

    READY = "ready"  # may be trained
    PLANNED = "planned"  # part of a TrainStep that has not committed
    TRAINED = "trained"  # part of a committed TrainStep; ``max_trained_count`` is reached
    STALE = "stale"  # too old, by ``staleness_policy``; kept, not trained
    QUARANTINED = "quarantined"  # must not be trained, because of its ``problem``; kept


class ColumnStatus(StrEnum):
    """The values of one Record that another process fills in (Column)."""

    OPEN = "open"  # may be claimed, from ``not_before`` on
    RUNNING = "running"  # claimed by a filler; the lease is valid until ``lease_expires_at``
    FILLED = "filled"  # terminal: it has its values
    FAILED = "failed"  # terminal: it was given up, and its Record is abandoned


class StepStatus(StrEnum):
    """One optimizer step."""

    PLANNING = "planning"  # its data are being marked, one chunk at a time
    PLANNED = "planned"  # its data are marked; the optimizer has not stepped
    COMMITTING = "committing"  # the optimizer has stepped; its data are updated one chunk at a time
    COMMITTED = "committed"  # the optimizer has stepped, and all its data are updated
    REVERTING = "reverting"  # undone; its data become ready one chunk at a time
    REVERTED = "reverted"  # undone: the trainer resumed from a checkpoint before it


class VersionStatus(StrEnum):
    """One published set of weights."""

    RESERVED = "reserved"  # a trainer has reserved number and folder; engines may not load it yet
    PUBLISHED = "published"
    WITHDRAWN = "withdrawn"  # its step was reverted; engines serve it until the next version


class ServiceStatus(StrEnum):
    """One live engine."""

    STARTING = "starting"
    READY = "ready"
    UPDATING = "updating"  # paused while it loads new weights
    LENT = "lent"  # paused, without weights in memory: the trainer computes on its device
    STOPPED = "stopped"


class EvaluationStatus(StrEnum):
    """One evaluation."""

    WAITING = "waiting"  # its version is published and will be evaluated
    RUNNING = "running"  # a process samples its tasks, as long as ``seen_at`` is recent
    STOPPED = "stopped"  # its process stopped before the end; the same command goes on
    FINISHED = "finished"  # it has results; → RUNNING when the same evaluation is asked for again


class Work(StrEnum):
    """What a trainer or a sampler does. Its own heartbeat says so, and nothing else claims that it waits."""

    STARTING = "starting"  # it loads what it works with
    WAITING = "waiting"  # it can do nothing until another process has done something
    SAMPLING = "sampling"  # it runs or scores trajectories
    TRAINING = "training"  # it computes a step
    PUBLISHING = "publishing"  # no step may begin before a version is published
    SAVING = "saving"  # it writes the last checkpoint and the last version


class TrainerEnd(StrEnum):
    """How the last trainer ended. Nothing is stored for one that failed or was killed."""

    FINISHED = "finished"  # it reached --max_steps or the end of the data
    STOPPED = "stopped"  # a signal stopped it; started again, it resumes


class StopReason(StrEnum):
    """Why a trajectory ended. The values with ``_error`` are names of the original system."""

    ANSWERED = "answered"
    TURNS_LIMIT = "turns_limit_error"
    LENGTH_LIMIT = "length_limit_error"
    REPETITION = "repetition_error"
    TIME_LIMIT = "time_limit_error"
    FAILED = "failed_error"

    @property
    def is_context_error(self) -> bool:
        """Return whether the trajectory ended because of the turn or length limit."""
        return self in (StopReason.TURNS_LIMIT, StopReason.LENGTH_LIMIT)


TASK_EDGES: dict[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.CREATED: frozenset({TaskStatus.RUNNING}),
    TaskStatus.RUNNING: frozenset({TaskStatus.WAITING}),
    TaskStatus.WAITING: frozenset({TaskStatus.COMPLETED, TaskStatus.RUNNING}),
    TaskStatus.COMPLETED: frozenset({TaskStatus.RUNNING, TaskStatus.WAITING}),
}
"""``→ RUNNING`` from ``WAITING`` or ``COMPLETED``, and ``COMPLETED → WAITING``, are ``agentrl db reopen``;
the latter retries a group whose finalization failed."""

RECORD_EDGES: dict[RecordStatus, frozenset[RecordStatus]] = {
    RecordStatus.CREATED: frozenset({RecordStatus.RUNNING, RecordStatus.FAILED, RecordStatus.RELEASED}),
    RecordStatus.RUNNING: frozenset({RecordStatus.COMPLETED, RecordStatus.FAILED, RecordStatus.RELEASED}),
    RecordStatus.COMPLETED: frozenset({RecordStatus.SCORING, RecordStatus.FAILED}),
    RecordStatus.SCORING: frozenset({RecordStatus.SCORED, RecordStatus.COMPLETED, RecordStatus.FAILED}),
    RecordStatus.SCORED: frozenset({RecordStatus.READY, RecordStatus.ABANDONED, RecordStatus.FAILED}),
    RecordStatus.READY: frozenset(),
    RecordStatus.ABANDONED: frozenset(),
    RecordStatus.FAILED: frozenset(),
    RecordStatus.RELEASED: frozenset({RecordStatus.RUNNING}),
}
"""``RELEASED → RUNNING``: another sampler goes on with the trajectory.
``SCORING → COMPLETED``: the scorer failed or its process ended; the Record waits for the next attempt to
score it."""

SAMPLED = (RecordStatus.COMPLETED, RecordStatus.SCORING)
"""Statuses of a Record that is sampled and has no score yet; it is never sampled again."""

RECORD_REVISIONS: dict[RecordStatus, frozenset[RecordStatus]] = {
    RecordStatus.READY: frozenset({RecordStatus.ABANDONED, RecordStatus.SCORED}),
    RecordStatus.ABANDONED: frozenset({RecordStatus.READY, RecordStatus.SCORED}),
    RecordStatus.FAILED: frozenset({RecordStatus.COMPLETED}),
}
"""Additional transitions while no data of the group have been trained: ``agentrl db rescore`` finalizes the
group again, and ``agentrl db reopen`` undoes its finalization (``→ SCORED``). ``FAILED → COMPLETED``:
``agentrl db rescore --status failed`` scores again what failed only in scoring."""

DATA_EDGES: dict[DataStatus, frozenset[DataStatus]] = {
    DataStatus.READY: frozenset({DataStatus.PLANNED, DataStatus.STALE, DataStatus.QUARANTINED}),
    DataStatus.PLANNED: frozenset({DataStatus.TRAINED, DataStatus.READY}),
    DataStatus.TRAINED: frozenset({DataStatus.READY}),
    DataStatus.STALE: frozenset({DataStatus.READY}),
    DataStatus.QUARANTINED: frozenset(),
}
"""``PLANNED → READY``: the trainer died, or ``max_trained_count`` is above 1. ``TRAINED → READY`` and
``STALE → READY``: the trainer resumed from an earlier checkpoint."""

COLUMN_EDGES: dict[ColumnStatus, frozenset[ColumnStatus]] = {
    ColumnStatus.OPEN: frozenset({ColumnStatus.RUNNING}),
    ColumnStatus.RUNNING: frozenset({ColumnStatus.OPEN, ColumnStatus.FILLED, ColumnStatus.FAILED}),
    ColumnStatus.FILLED: frozenset(),
    ColumnStatus.FAILED: frozenset({ColumnStatus.OPEN}),
}
"""``FAILED → OPEN``: ``agentrl db reopen --failure_kind column``."""

STEP_EDGES: dict[StepStatus, frozenset[StepStatus]] = {
    StepStatus.PLANNING: frozenset({StepStatus.PLANNED, StepStatus.REVERTING}),
    StepStatus.PLANNED: frozenset({StepStatus.COMMITTING, StepStatus.REVERTING}),
    StepStatus.COMMITTING: frozenset({StepStatus.COMMITTED, StepStatus.REVERTING}),
    StepStatus.COMMITTED: frozenset({StepStatus.REVERTING}),
    StepStatus.REVERTING: frozenset({StepStatus.REVERTED}),
    StepStatus.REVERTED: frozenset(),
}
"""A step whose data fit into one transaction passes ``PLANNING`` and ``COMMITTING`` inside it. If a trainer
dies in ``PLANNING``, ``COMMITTING`` or ``REVERTING``, only some of the data are updated; the next trainer
finishes the change before it starts."""

APPLIED_STEPS = (StepStatus.COMMITTING, StepStatus.COMMITTED)
"""Statuses of steps whose update is in the weights."""

ACTIVE_STEPS = (StepStatus.PLANNING, StepStatus.PLANNED, *APPLIED_STEPS)
"""Statuses of steps that count; of each step number at most one step has such a status."""

VERSION_EDGES: dict[VersionStatus, frozenset[VersionStatus]] = {
    VersionStatus.RESERVED: frozenset({VersionStatus.PUBLISHED}),
    VersionStatus.PUBLISHED: frozenset({VersionStatus.WITHDRAWN}),
    VersionStatus.WITHDRAWN: frozenset({VersionStatus.PUBLISHED}),
}
"""``→ WITHDRAWN``: the trainer resumed from a checkpoint before the version's step.
``WITHDRAWN → PUBLISHED``: the step was repeated with the same weights."""


def values(states: Iterable[StrEnum]) -> list[str]:
    """Return the stored values of ``states``."""
    return [state.value for state in states]


def sources(edges: Mapping[_State, frozenset[_State]], target: _State) -> list[str]:
    """Return the statuses that may change to ``target``; conditional updates filter on them."""
    return [str(state) for state, targets in edges.items() if target in targets]
