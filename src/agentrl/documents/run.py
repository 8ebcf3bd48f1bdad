"""Documents that a run has once: schema version, settings, admission gate, epochs, the trainer's lease.

Each kind has a collection of its own, because different database users may write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from agentrl.documents.base import Document, Root
from agentrl.documents.status import EpochStatus, TrainerEnd

SCHEMA: Final = "schema"
"""``_id`` of the document in ``Run`` with the version of the database schema. Administrators change it."""

REMARKS: Final = "remarks"
"""``_id`` of the document in ``Run`` with the tags and the note that people give the run."""

ADMISSION: Final = "admission"
"""``_id`` of the ``Gate`` in ``Admission``."""

TRAINER: Final = "trainer"
"""``_id`` of the ``TrainerLease``, alone in its collection."""

SETTINGS: Final = ("tasks", "model", "chat", "sampling", "temperature", "groups", "loss", "adapter")
"""Concerns that the processes of a run must agree on; each is the ``_id`` of a document of ``Settings``."""

FLAGS: Final = ("sample", "train", "serve")
"""Roles whose resolved configuration is stored, as the first process of the role had it."""


_FLAGS_PREFIX: Final = "flags/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFact(Root):
    """A document of ``Run``, which administrators write."""

    id: str
    version: int | None = None
    importing: bool | None = None
    """True during an import, and while a renamed run is copied."""
    renaming: tuple[str, ...] = ()
    """The old and the new name, in both databases, until a renaming has ended."""
    tags: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportList(Root):
    """The functions that tasks may name as ``module:function``; alone in its collection."""

    id: str = "imports"
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(Root):
    """Settings of a concern, or flags of a role: inserted once, by the first process, and never changed."""

    id: str
    values: dict[str, Any]
    """Name → value, without secrets. Flags are resolved: defaults that depend on others are filled in."""
    by: str
    """The command and the host that wrote them."""
    at: datetime
    given: tuple[str, ...] = ()
    """The names of the given flags, on the command line or in a file; only for flags."""
    packages: dict[str, str] | None = None
    """Flags alone: package → version."""

    @property
    def given_values(self) -> list[tuple[str, Any]]:
        """The given flags with their values; ``***`` for secret ones, which are not stored."""
        return [(name, self.values.get(name, "***")) for name in self.given]

    @property
    def role(self) -> str | None:
        """The role whose flags these are; None for the settings of a concern."""
        return self.id.removeprefix(_FLAGS_PREFIX) if self.id.startswith(_FLAGS_PREFIX) else None


def flags_key(role: str) -> str:
    """Return the ``_id`` in ``Settings`` of a role's flags."""
    return f"{_FLAGS_PREFIX}{role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate(Root):
    """Counts the groups that were opened. Every admission writes it, so that concurrent ones conflict."""

    id: str = ADMISSION
    opened: int = 0
    begun: int = 0
    """Groups begun under ``--task_selection pass_rate``: the last ``Task.begun.number``."""


def epoch_key(split: str, epoch: int) -> str:
    """Return the ``_id`` of an ``EpochOpening``."""
    return f"{split}/{epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOpening(Root):
    """One epoch of one split: whether all of its tasks are inserted, and the process that inserts them.

    Epoch 0 holds the loaded tasks; each later epoch copies it. A process that takes over uses the stored
    ``seed``, ``shuffle`` and ``num_generations``. ``attempt`` fences earlier owners.
    """

    id: str
    status: EpochStatus = EpochStatus.OPENING
    tasks: int = 0
    """Number of its tasks; while it is opening, the expected number."""
    attempt: int = 0
    owner: str | None = None
    lease_expires_at: datetime | None = None
    seed: int | None = None
    shuffle: bool | None = None
    num_generations: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity(Document):
    """Identifies one process for all time: a host name and a pid alone are reused."""

    boot_id: str
    """Boot id of its kernel."""
    pid_namespace: str
    """Namespace of ``pid``."""
    pid: int
    started: int
    """Clock ticks from the boot to its start, which differ from those of a later process with this pid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLease(Root):
    """The lease of the one trainer that may plan, commit and revert steps; ``attempt`` fences it."""

    id: str = TRAINER
    attempt: int = 0
    owner: str | None = None
    host: str | None = None
    pid: int | None = None
    process: ProcessIdentity | None = None
    lease_expires_at: datetime | None = None
    writes: int = 0
    """Incremented by each write that the attempt fences, so that it conflicts with a takeover."""
    discarded: tuple[str, ...] = ()
    """Checkpoints that are being deleted; training does not resume from them."""
    ended: TrainerEnd | None = None
    """How the last trainer ended; None while one runs, and if it failed or was killed."""

    def is_held(self, at: datetime) -> bool:
        """Return whether a trainer holds the lease at the server's time ``at``."""
        return self.owner is not None and self.lease_expires_at is not None and self.lease_expires_at > at
