"""Outage: a dependency of trajectories that is down, as one sampler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from agentrl.documents.base import Root, now


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage(Root):
    """One outage. It goes on while ``ended_at`` is None and its process refreshes ``seen_at``."""

    id: str
    dependency: str
    """What is down, as text: ``tool server search``."""
    by: str
    """The process that sees it."""
    why: str
    """The last error."""
    held: int = 0
    """Calls that wait for it."""
    began_at: datetime = field(default_factory=now)
    seen_at: datetime = field(default_factory=now)
    ended_at: datetime | None = None
