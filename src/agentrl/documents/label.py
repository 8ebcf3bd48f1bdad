"""Label: what a person says of one trajectory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from agentrl.documents.base import Root, now
from agentrl.errors import ConfigError

MAX_LABEL: Final = 64
MAX_NOTE: Final = 4000
MAX_NAME: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Label(Root):
    """One person's label of one Record. ``id`` is ``record_id@by``: a person has one label per trajectory."""

    id: str
    record: str
    by: str
    """The name that the person gave."""
    written_by: str | None = None
    """Who wrote it by authentication: the user and host of the dashboard, and the database user."""
    label: str
    """A word to filter by, such as ``wrong`` or ``cheats``."""
    note: str = ""
    score: float | None = None
    """The score that the trajectory deserves; ``agentrl db rescore --from-labels`` applies it."""
    created_at: datetime = field(default_factory=now)
    updated_at: datetime = field(default_factory=now)


def label_key(record_id: str, by: str) -> str:
    """Return the ``_id`` of a person's label of a Record."""
    return f"{record_id}@{by}"


def check_label(*, label: str, note: str, by: str, score: float | None) -> None:
    """Raise ConfigError for a text that is missing or too long, or a score that is not finite."""
    for what, text, shortest, longest in (
        ("label", label, 1, MAX_LABEL), ("note", note, 0, MAX_NOTE), ("name", by, 1, MAX_NAME)
    ):  # fmt: skip
        if not shortest <= len(text) <= longest:
            raise ConfigError(
                f"the {what} has {len(text)} characters", hint=f"give {shortest} to {longest} characters"
            )
    if score is not None and not math.isfinite(score):
        raise ConfigError(f"the score is {score}", hint="give a finite number, or none")
