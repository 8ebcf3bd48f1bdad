"""DBRecordData: training data made from one Record; TrainStep: one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentrl.documents.base import Document, Root, now
from agentrl.documents.status import DataStatus, StepStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Document):
    """A run of tokens ``[start, end)`` whose first token follows the last token of node ``parent``.

    ``parent`` is an index into ``nodes`` and always smaller than the node's own; −1 is a root.
    """

    start: int
    end: int
    parent: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableSpan(Document):
    """Trainable tokens ``[start, end)``, all of one model call, sampled under one policy version."""

    start: int
    end: int
    call: int
    version: int
    advantage: float
    temperature: float
    """Of the model call: it sampled from softmax(logits / temperature)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DBRecordData(Root):
    """The token tree of one trajectory. ``id`` is the Record's.

    A trajectory whose turns extend one another is one node; a context reset starts a new root.
    """

    id: str
    record: str
    task: str
    split: str
    status: DataStatus = DataStatus.READY
    score: float
    advantage: float
    min_version: int
    max_version: int
    tokens: int
    trainable_tokens: int
    turns: int
    nodes: tuple[Node, ...]
    spans: tuple[TrainableSpan, ...]
    trained_count: int = 0
    trained_at_steps: tuple[int, ...] = ()
    planned_step: int | None = None
    not_before_step: int = 0
    """First step that may train it again."""
    problem: str | None = None
    """Why it is quarantined."""
    created_at: datetime = field(default_factory=now)
    input_ids: bytes
    """int32[tokens], nodes in order."""
    behavior_logprobs: bytes
    """float32[trainable_tokens], spans in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCommit(Document):
    """What a commit of several parts needs to go on."""

    max_trained_count: int
    retrained_interval: int
    counted: tuple[str, ...] = ()
    """Tasks whose groups the step's metrics count."""
    untrained: tuple[str, ...] = ()
    """Data of the step that it did not train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep(Root):
    """One optimizer step. ``id`` is ``attempt-of-the-run/step``; ``step`` counts committed steps from 1."""

    id: str
    step: int
    status: StepStatus = StepStatus.PLANNED
    policy_version: int
    """The version that the step starts from."""
    data: tuple[str, ...]
    """``_id`` of every DBRecordData in the step."""
    metrics: dict[str, Any] = field(default_factory=dict)
    owner: str
    planned_at: datetime = field(default_factory=now)
    committed_at: datetime | None = None
    pending: PendingCommit | None = None
    """While it is ``committing``: what is left to do."""
    pruned_at: datetime | None = None
    """When ``agentrl db prune`` last deleted data that it names."""
