"""InferenceService: one live engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from agentrl.documents.base import Root, now
from agentrl.documents.status import ServiceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceService(Root):
    """One live engine. It is alive while ``heartbeat`` is younger than the heartbeat timeout."""

    id: str
    url: str
    engine: str
    model: str
    status: ServiceStatus = ServiceStatus.STARTING
    policy_version: int | None = None
    running_requests: int = 0
    detail: str | None = None
    host: str
    pid: int
    instance: str | None = None
    """Random name that the server answers; another server at the same url does not."""
    started_at: datetime = field(default_factory=now)
    heartbeat: datetime = field(default_factory=now)
