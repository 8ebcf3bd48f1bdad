"""Retraction and Tombstone: what was withdrawn from a run, when, why and by whom; nothing of its content."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from agentrl.documents.base import Document, Root, now


class Withdrawn(StrEnum):
    """What a tombstone stands for."""

    RECORD = "record"  # one attempt at a trajectory
    TASK = "task"  # a task as a whole, with query and answer; its Records have tombstones of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone(Root):
    """One withdrawn Record or Task; ``id`` is its ``_id``, which appears nowhere else in the run any more."""

    id: str
    kind: Withdrawn
    task: str
    """``_id`` of the Task."""
    retraction: int
    """``_id`` of the Retraction."""
    created_at: datetime
    """When the Record or Task was created: it tells it from one of another run with the same ``_id``."""
    steps: tuple[str, ...] = ()
    """``_id`` of each TrainStep that trained it, undone ones included."""
    deleted_at: datetime | None = None
    """When its documents were deleted; None: not yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraction(Root):
    """One call of ``agentrl retract``, and how far it is. ``id`` counts from 1."""

    id: int
    because: str
    by: str
    """The user and the host."""
    records: int
    tasks: int
    first_step: int | None = None
    """The first step in the weights that trained some of it; None: no such step."""
    rebuilds: bool = False
    """Whether the run is to go back to the last checkpoint before ``first_step``."""
    rebuilt: Rebuilt | None = None
    family: bool = False
    """Whether it is still to be withdrawn from the run's children."""
    archives: tuple[str, ...] = ()
    """Host and path of each export that it is still to be taken out of. For people: no export is opened that
    the command line does not name."""
    images: tuple[str, ...] = ()
    """Images that the withdrawn documents named and that are not looked at yet."""
    at: datetime = field(default_factory=now)
    deleted_at: datetime | None = None
    """When the run held nothing of it any more except images; None: a trainer would still read some of it."""
    finished_at: datetime | None = None
    """When nothing was left to delete; None: the next call goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt(Document):
    """How the run went back."""

    step: int
    """The step of the checkpoint that training goes on from; 0: the base model."""
    checkpoints: tuple[str, ...] = ()
    """The deleted checkpoints."""
    versions: tuple[int, ...] = ()
    """The versions whose folders were deleted: the first and the last; empty without any."""
    at: datetime = field(default_factory=now)
