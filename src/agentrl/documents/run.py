"""Run: what there is once in a run, each under an ``_id`` of its own; here the lease of its trainer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from agentrl.documents.base import Root

SCHEMA: Final = "schema"
"""``_id`` of ``{version}``: the version of the database's shape."""

ADMISSION: Final = "admission"
"""``_id`` of ``{opened}``: every opening of a group writes it, so that openings come one after another.

It orders transactions and counts nothing that anyone reads.
"""

TRAINER: Final = "trainer"
"""``_id`` of the ``TrainerLease``."""


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
