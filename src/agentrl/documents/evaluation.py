"""Evaluation: one policy sampled on one set of tasks, with its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from agentrl.documents.base import Root, now
from agentrl.documents.status import EvaluationStatus

OUTSIDE_VERSION: Final = -2
"""The version in the tokens of weights that are not a policy version of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Root):
    """One evaluation. ``id`` is the split of its Tasks and Records.

    The id contains a hash of the tasks and of the settings: an edited task file is another evaluation.
    """

    id: str
    status: EvaluationStatus = EvaluationStatus.WAITING
    version: int | None
    """The policy version; None for a model folder."""
    step: int | None = None
    """The optimizer step of the version."""
    model: str | None
    """Folder of the weights; None if it is not on the machine of the evaluation."""
    model_digest: str | None = None
    """Hash of the files of a model folder."""
    file: str
    """The task file as it was named."""
    tasks_digest: str
    """Hash of the content of all tasks."""
    settings_digest: str
    """Hash of ``settings``."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Flags that change what is sampled."""
    samples: int
    """Trajectories per task."""
    label: str = ""
    right_threshold: float
    """A trajectory passes when its score is above this."""
    results: dict[str, Any] | None = None
    """Set when it is finished: ``scoring.evaluation.Summary`` as JSON, and one for each group of tasks."""
    by: str | None = None
    """The process that evaluates."""
    began_at: datetime = field(default_factory=now)
    seen_at: datetime = field(default_factory=now)
    """When its process last wrote; the weights of an evaluation that was seen lately are not deleted."""
    finished_at: datetime | None = None

    @property
    def total(self) -> dict[str, Any]:
        """The results of all tasks together; empty before it is finished."""
        return (self.results or {}).get("total") or {}
