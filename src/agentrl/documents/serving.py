"""PolicyVersion: one published set of weights. InferenceService: one engine that serves them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from agentrl.documents.base import Document, Root, now
from agentrl.documents.status import ServiceStatus, VersionStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChecksum(Document):
    """The name, size and checksum of one file in a published folder."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion(Root):
    """One published set of weights. Version 0 is the model that the run starts from."""

    id: int
    step: int
    status: VersionStatus = VersionStatus.PUBLISHED
    location: str
    """Absolute path of a Hugging Face folder that every engine can read."""
    files: tuple[FileChecksum, ...]
    train_step: str | None
    published_at: datetime = field(default_factory=now)
    attempt: int | None = None
    """The attempt of the trainer that reserved the number; None without a reservation."""
    pruned_at: datetime | None = None
    """When the folder was marked for deletion."""


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
    running_tokens: int = 0
    """Tokens of the running and queued requests; 0 for an engine that does not report them."""
    context_length: int | None = None
    """Largest number of tokens of a prompt and its continuation; None until the engine is ready."""
    tokenizer: str | None = None
    """Fingerprint of the tokenizer in the folder that the engine serves."""
    detail: str | None = None
    host: str
    pid: int
    instance: str | None = None
    """A random name that the engine's server returns; it identifies the server behind ``url``."""
    started_at: datetime = field(default_factory=now)
    heartbeat: datetime = field(default_factory=now)
