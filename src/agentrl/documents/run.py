"""What there is once in a run: the version of its schema, the admission gate, the lease of its trainer.

Each has a collection of its own, since different users of the database may write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from agentrl.documents.base import Root

SCHEMA: Final = "schema"
"""``_id`` of ``{version}`` in ``Run``: the version of the database's shape. Administrators change it."""

IMPORTS: Final = "imports"
"""``_id`` of ``{paths}`` in ``Run``: the functions that loaded tasks name as ``module:function``."""

ADMISSION: Final = "admission"
"""``_id`` of the ``Gate`` in ``Admission``."""

TRAINER: Final = "trainer"
"""``_id`` of the ``TrainerLease``, alone in its collection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFact(Root):
    """A document of ``Run``."""

    id: str
    version: int | None = None
    importing: bool | None = None
    """True while an import goes on."""
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate(Root):
    """Every opening of a group writes it, so that openings come one after another.

    It orders transactions and counts nothing that anyone reads.
    """

    id: str = ADMISSION
    opened: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLease(Root):
    """The one trainer that may plan, commit and revert steps. ``attempt`` fences the ones before it."""

    id: str = TRAINER
    attempt: int = 0
    owner: str | None = None
    host: str | None = None
    pid: int | None = None
    lease_expires_at: datetime | None = None
    writes: int = 0
    """Grows with each write that the attempt guards: a takeover and such a write cannot pass each other."""
