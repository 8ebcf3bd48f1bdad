"""Every state a document can be in, and the edges along which it may move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

_State = TypeVar("_State", bound=StrEnum)


class EpochStatus(StrEnum):
    """One epoch of a split."""

    OPENING = "opening"  # its tasks are being inserted; they may be claimed already
    OPEN = "open"  # it holds every task; → OPENING when tasks are added later


class TaskStatus(StrEnum):
    """A Task is one group: its slots are the group's generations."""

    CREATED = "created"  # not admitted: nobody may claim a slot yet
    RUNNING = (
        "running"  # admitted: slots may be claimed (every one may be open); at least one is not terminal
    )
    WAITING = "waiting"  # every slot is terminal; the group has not been finalized
    COMPLETED = "completed"  # the group is finalized: its training data exist, or it was abandoned


class SlotStatus(StrEnum):
    """One generation of a Task."""

    OPEN = "open"  # free to claim (from ``not_before`` on)
    RUNNING = "running"  # claimed; the lease is alive until ``lease_expires_at``
    SCORED = "scored"  # terminal: its Record has a score
    FAILED = "failed"  # terminal: ``max_attempts`` attempts failed


class RecordStatus(StrEnum):
    """One attempt at a trajectory."""

    CREATED = "created"  # inserted after the claim; no model call yet
    RUNNING = "running"  # turns are being written
    COMPLETED = "completed"  # the conversation has ended
    SCORING = "scoring"  # the scorer works on it
    SCORED = "scored"  # it has a score and waits for its group
    READY = "ready"  # its group is finalized and its DBRecordData exist
    ABANDONED = "abandoned"  # its group is finalized and does not train it (``abandoned_because``)
    FAILED = "failed"  # infrastructure failed (``failure``); it has no score
    RELEASED = "released"  # handed back unfinished: no failure, no score


class CallStatus(StrEnum):
    """One model call of a trajectory (DispatchedSamplingTask)."""

    COMPLETED = "completed"
    FORMAT_ERROR = "formaterror"  # a malformed tool call: trainable, advantage 0
    REPEAT_ERROR = "repeaterror"  # the same text twice: trainable, advantage 0
    TOOL_FAILED = "toolfailed"  # a tool answered with an error: trainable
    FAILED = "failed"  # the engine failed: not trainable


class DataStatus(StrEnum):
    """Training data made from one Record (DBRecordData)."""

    READY = "ready"  # waits to be trained
    PLANNED = "planned"  # named by a TrainStep that has not committed
    TRAINED = "trained"  # named by a committed TrainStep; ``max_trained_count`` is reached
    STALE = "stale"  # older than ``max_staleness``: kept, never trained
    QUARANTINED = "quarantined"  # cannot or must not be trained, because of its ``problem``: kept


class StepStatus(StrEnum):
    """One optimizer step."""

    PLANNING = "planning"  # its data are being marked, a part at a time
    PLANNED = "planned"  # its data are marked; the optimizer has not stepped
    COMMITTING = "committing"  # the optimizer has stepped, and the step counts; its data follow in parts
    COMMITTED = "committed"  # the optimizer has stepped, and all of its data say so
    REVERTING = "reverting"  # undone, and no longer counted; its data become ready in parts
    REVERTED = "reverted"  # undone: the trainer resumed from a checkpoint before it


class VersionStatus(StrEnum):
    """One published set of weights."""

    RESERVED = "reserved"  # its number and its folder belong to one trainer; nobody may load it yet
    PUBLISHED = "published"
    WITHDRAWN = "withdrawn"  # its step was undone; engines that hold it keep serving until the next


class ServiceStatus(StrEnum):
    """One live engine."""

    STARTING = "starting"
    READY = "ready"
    UPDATING = "updating"  # paused while it loads new weights
    STOPPED = "stopped"


class StopReason(StrEnum):
    """Why a trajectory ended. Values that end in ``_error`` are the original's names."""

    ANSWERED = "answered"
    TURNS_LIMIT = "turns_limit_error"
    LENGTH_LIMIT = "length_limit_error"
    REPETITION = "repetition_error"
    FAILED = "failed_error"

    @property
    def is_context_error(self) -> bool:
        """True where the trajectory ran out of turns or context rather than ending by itself."""
        return self in (StopReason.TURNS_LIMIT, StopReason.LENGTH_LIMIT)


TASK_EDGES: dict[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.CREATED: frozenset({TaskStatus.RUNNING}),
    TaskStatus.RUNNING: frozenset({TaskStatus.WAITING}),
    TaskStatus.WAITING: frozenset({TaskStatus.COMPLETED, TaskStatus.RUNNING}),
    TaskStatus.COMPLETED: frozenset({TaskStatus.RUNNING, TaskStatus.WAITING}),
}
"""``→ RUNNING`` from the two last is ``agentrl db reopen``. So is ``COMPLETED → WAITING``: a group that could
not be finalized is tried again."""

RECORD_EDGES: dict[RecordStatus, frozenset[RecordStatus]] = {
    RecordStatus.CREATED: frozenset({RecordStatus.RUNNING, RecordStatus.FAILED, RecordStatus.RELEASED}),
    RecordStatus.RUNNING: frozenset({RecordStatus.COMPLETED, RecordStatus.FAILED, RecordStatus.RELEASED}),
    RecordStatus.COMPLETED: frozenset({RecordStatus.SCORING, RecordStatus.FAILED, RecordStatus.RELEASED}),
    RecordStatus.SCORING: frozenset({RecordStatus.SCORED, RecordStatus.FAILED, RecordStatus.RELEASED}),
    RecordStatus.SCORED: frozenset({RecordStatus.READY, RecordStatus.ABANDONED, RecordStatus.FAILED}),
    RecordStatus.READY: frozenset(),
    RecordStatus.ABANDONED: frozenset(),
    RecordStatus.FAILED: frozenset(),
    RecordStatus.RELEASED: frozenset(),
}

RECORD_REVISIONS: dict[RecordStatus, frozenset[RecordStatus]] = {
    RecordStatus.READY: frozenset({RecordStatus.ABANDONED, RecordStatus.SCORED}),
    RecordStatus.ABANDONED: frozenset({RecordStatus.READY, RecordStatus.SCORED}),
}
"""Besides, while nothing of its group has been trained: ``agentrl db rescore`` decides the group again, and
``agentrl db reopen`` makes it one that has not been decided (``→ SCORED``)."""

DATA_EDGES: dict[DataStatus, frozenset[DataStatus]] = {
    DataStatus.READY: frozenset({DataStatus.PLANNED, DataStatus.STALE, DataStatus.QUARANTINED}),
    DataStatus.PLANNED: frozenset({DataStatus.TRAINED, DataStatus.READY}),
    DataStatus.TRAINED: frozenset({DataStatus.READY}),
    DataStatus.STALE: frozenset({DataStatus.READY}),
    DataStatus.QUARANTINED: frozenset(),
}
"""``PLANNED → READY`` is a trainer that died or a ``max_trained_count`` above 1; ``→ READY`` from ``TRAINED``
and ``STALE`` is a resume from a checkpoint before a step that trained them."""

STEP_EDGES: dict[StepStatus, frozenset[StepStatus]] = {
    StepStatus.PLANNING: frozenset({StepStatus.PLANNED, StepStatus.REVERTING}),
    StepStatus.PLANNED: frozenset({StepStatus.COMMITTING, StepStatus.REVERTING}),
    StepStatus.COMMITTING: frozenset({StepStatus.COMMITTED, StepStatus.REVERTING}),
    StepStatus.COMMITTED: frozenset({StepStatus.REVERTING}),
    StepStatus.REVERTING: frozenset({StepStatus.REVERTED}),
    StepStatus.REVERTED: frozenset(),
}
"""A step whose data fit into one transaction passes ``PLANNING`` and ``COMMITTING`` within it, unseen. A
trainer that dies in one of the ``-ing`` states leaves some data before it and some behind; the next trainer
finishes the change before it begins."""

APPLIED_STEPS = (StepStatus.COMMITTING, StepStatus.COMMITTED)
"""Steps whose updates are in the weights."""

ACTIVE_STEPS = (StepStatus.PLANNING, StepStatus.PLANNED, *APPLIED_STEPS)
"""Steps that hold their number; of each number there is at most one."""

VERSION_EDGES: dict[VersionStatus, frozenset[VersionStatus]] = {
    VersionStatus.RESERVED: frozenset({VersionStatus.PUBLISHED}),
    VersionStatus.PUBLISHED: frozenset({VersionStatus.WITHDRAWN}),
    VersionStatus.WITHDRAWN: frozenset({VersionStatus.PUBLISHED}),
}
"""``→ WITHDRAWN`` is a resume from a checkpoint before the version's step; ``WITHDRAWN → PUBLISHED`` is that
step done again with the same weights as before."""


def values(states: Iterable[StrEnum]) -> list[str]:
    """The states as they are stored."""
    return [state.value for state in states]


def sources(edges: Mapping[_State, frozenset[_State]], target: _State) -> list[str]:
    """The states from which ``target`` may be reached; conditional updates filter on them."""
    return [str(state) for state, targets in edges.items() if target in targets]
