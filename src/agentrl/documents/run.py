"""What there is once in a run: the version of its schema, the admission gate, the lease of its trainer.

Each has a collection of its own, since different users of the database may write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from agentrl.documents.base import Document, Root
from agentrl.documents.status import EpochStatus

SCHEMA: Final = "schema"
"""``_id`` of ``{version}`` in ``Run``: the version of the database's shape. Administrators change it."""

ADMISSION: Final = "admission"
"""``_id`` of the ``Gate`` in ``Admission``."""

TRAINER: Final = "trainer"
"""``_id`` of the ``TrainerLease``, alone in its collection."""


SETTINGS: Final = ("tasks", "model", "chat", "sampling", "temperature", "groups", "loss", "adapter")
"""What the processes of a run must agree on, by concern: the ``_id`` of a document of ``Settings``."""

FLAGS: Final = ("sample", "train", "serve")
"""Roles whose flags are kept: those that the first process had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFact(Root):
    """What administrators keep in ``Run``."""

    id: str
    version: int | None = None
    importing: bool | None = None
    """True while an import goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportList(Root):
    """The functions that tasks may name as ``module:function``; alone in its collection."""

    id: str = "imports"
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(Root):
    """Settings or flags, inserted once, by the first process that starts."""

    id: str
    values: dict[str, Any]
    """Name → value, without secrets."""
    by: str
    """The command and the host that wrote them."""
    at: datetime


def flags_key(role: str) -> str:
    """The ``_id`` in ``Settings`` of a role's flags."""
    return f"flags/{role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate(Root):
    """Every opening of a group writes it, so that openings come one after another.

    Writing ``opened`` makes concurrent admissions conflict.
    """

    id: str = ADMISSION
    opened: int = 0
    begun: int = 0
    """Groups begun under ``--task_selection pass_rate``: the last ``Task.begun.number``."""


def epoch_key(split: str, epoch: int) -> str:
    """The ``_id`` of an ``EpochOpening``."""
    return f"{split}/{epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOpening(Root):
    """One epoch of one split: whether it holds every task, and the process that inserts them.

    Epoch 0 is what was loaded; each later epoch copies it. Whoever continues an opening uses the stored
    ``seed``, ``shuffle`` and ``num_generations``. ``attempt`` fences the owners before.
    """

    id: str
    status: EpochStatus = EpochStatus.OPENING
    tasks: int = 0
    """Tasks that it holds once it is open; while it is opening, as many as are expected."""
    attempt: int = 0
    owner: str | None = None
    lease_expires_at: datetime | None = None
    seed: int | None = None
    shuffle: bool | None = None
    num_generations: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity(Document):
    """One process of one boot of one kernel. Host name and pid alone are shared by many."""

    boot_id: str
    """Of the kernel that runs it."""
    pid_namespace: str
    """In which ``pid`` is its number."""
    pid: int
    started: int
    """Clock ticks from the boot to its start: a later process with the same pid has another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLease(Root):
    """The one trainer that may plan, commit and revert steps. ``attempt`` fences the ones before it."""

    id: str = TRAINER
    attempt: int = 0
    owner: str | None = None
    host: str | None = None
    pid: int | None = None
    process: ProcessIdentity | None = None
    lease_expires_at: datetime | None = None
    writes: int = 0
    """Grows with each write that the attempt guards: a takeover and such a write cannot pass each other."""
    discarded: tuple[str, ...] = ()
    """Checkpoints that are being deleted: none of them is resumed from."""
