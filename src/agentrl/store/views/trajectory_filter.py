"""Select trajectories: the filter of the dashboard, of ``agentrl audit records`` and of notebooks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agentrl.documents.status import SHOWN_STATUSES, TRAINED, RecordStatus
from agentrl.errors import ConfigError
from agentrl.store.connection import Json

MAX_TEXT = 200


@dataclass(frozen=True, slots=True)
class Bounds:
    """An inclusive range; None leaves a side open. Raises ConfigError if it is empty or not finite."""

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for value in (self.low, self.high):
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"a bound is {value}", hint="give a finite number")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigError(
                f"the range from {self.low:g} to {self.high:g} is empty", hint="exchange its bounds"
            )

    @property
    def query(self) -> Json:
        """Return the MongoDB operators of the range; empty if both sides are open."""
        operators = {"$gte": self.low, "$lte": self.high}
        return {name: value for name, value in operators.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFilter:
    """Which trajectories to read; a field that is None, and an open range, select all.

    Raises ConfigError for a range that is empty and for a text that cannot be searched.
    """

    status: str | None = None
    """A status as people read it, of ``SHOWN_STATUSES``: ``ready`` leaves out what is ``trained``."""
    score: Bounds = field(default_factory=Bounds)
    step: int | None = None
    """Trajectories that the committed step with this number trained."""
    split: str | None = None
    task: str | None = None
    """A Task's ``_id`` (``train/0/task_001``), or its ``task_id`` in any split and epoch."""
    tool: str | None = None
    """Trajectories that called the tool of this name."""
    failure: str | None = None
    """The kind of the failure: engine, tool, timeout, …"""
    text: str | None = None
    """Literal text, in any case, of the question, the final answer, a message, response or tool result."""
    version: int | None = None
    """Trajectories whose tokens may be of this policy version: it is between their lowest and highest."""
    tokens: Bounds = field(default_factory=Bounds)
    """Generated tokens."""
    turns: Bounds = field(default_factory=Bounds)
    """Model calls."""
    label: str | None = None
    """Trajectories that a person gave this label."""

    def __post_init__(self) -> None:
        if self.status is not None and self.status not in SHOWN_STATUSES:
            raise ConfigError(
                f"status is {self.status[:80]!r}", hint=f"choose one of {', '.join(SHOWN_STATUSES)}"
            )
        if self.text is None:
            return
        if not 0 < len(self.text) <= MAX_TEXT or "\x00" in self.text:
            raise ConfigError(
                f"the text to search has {len(self.text)} characters",
                hint=f"give 1 to {MAX_TEXT} characters, without NUL",
            )

    @property
    def query(self) -> Json:
        """Return the filter of the Records, without ``step``, ``task``, ``tool``, ``text`` and ``label``.

        ``TrajectorySearch`` resolves these with the other collections.
        """
        query: Json = {}
        if self.split is not None:
            query["split"] = self.split
        if self.status is not None:
            is_ready = self.status in (RecordStatus.READY, TRAINED)
            query["status"] = RecordStatus.READY.value if is_ready else self.status
            if is_ready:
                query["trained_count"] = {"$gt": 0} if self.status == TRAINED else 0
        if self.failure is not None:  # only failed Records have one, and an index begins with the status
            query = {"status": RecordStatus.FAILED.value, **query, "failure.kind": self.failure}
        if self.version is not None:
            query["min_version"] = {"$lte": self.version}
            query["max_version"] = {"$gte": self.version}
        for name, bounds in (
            ("score", self.score), ("generated_tokens", self.tokens), ("turns", self.turns)
        ):  # fmt: skip
            if bounds.query:
                query[name] = bounds.query
        return query

    @property
    def is_empty(self) -> bool:
        """Return whether it selects every trajectory."""
        return self == TrajectoryFilter()
