"""GatewaySession and GatewayCall: the URL of one trajectory, and the requests that came to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from agentrl.documents.base import Document, Root, now


class GatewayCallStatus(StrEnum):
    """One request to a gateway."""

    RUNNING = "running"  # a gateway generates its answer, until ``expires_at``
    DONE = "done"  # its model call is stored
    FAILED = "failed"  # it has no answer; the same request starts again


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySession(Root):
    """The base URL of one trajectory. ``id`` is the SHA-256 of its token; the token itself is not stored."""

    id: str
    record: str
    task: str
    traj_id: int
    attempt: int
    owner: str
    """The owner of the claim; the URL is dead when its lease ends."""
    models: tuple[str, ...]
    """The names, and patterns such as ``claude-*``, by which a request may name the policy."""
    max_calls: int
    created_at: datetime = field(default_factory=now)
    closed_at: datetime | None = None
    stopped_by: str | None = None
    """Why a request was refused: ``turns``, ``length``, or ``unavailable`` if no engine answered it."""
    trace_id: str | None = None
    """The trace of the trajectory, to which every gateway adds its model calls."""
    reward_key_digest: str | None = None
    """SHA-256 of the key, not the token, that a reward or feedback needs; None: it takes no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCall(Root):
    """One request and its model call. ``id`` is ``record:digest:number``.

    ``digest`` identifies retries: of the idempotency key if there is one, else of the body.
    """

    id: str
    record: str
    digest: str
    number: int
    answer_id: str
    """Identifies the answer to the client."""
    dialect: str
    gateway: str
    """The process that generates the answer."""
    status: GatewayCallStatus
    expires_at: datetime
    call: str | None = None
    """``_id`` of the model call."""
    after: str | None = None
    """Digest of the conversation with the answer; a request that continues it has the same prefix."""
    created_at: datetime = field(default_factory=now)
    finished_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedReward(Document):
    """A reward that the agent reported through its gateway; no scorer runs then."""

    score: float
    details: dict[str, Any] = field(default_factory=dict)
    turn_rewards: dict[str, float] = field(default_factory=dict)
    """Index of the model call → its reward."""
    role_rewards: dict[str, float] = field(default_factory=dict)
    """Role → its reward."""
