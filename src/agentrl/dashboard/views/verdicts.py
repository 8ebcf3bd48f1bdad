"""Arrange the scores of a trajectory: each scorer's, earlier and later ones, and what judges wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.dashboard.views.text import Shown, shown
from agentrl.documents.record import Record

_HEAD = ("scorer", "score", "judge", "reply", "parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One score, by whom, and the reasons."""

    scorer: str
    score: float | None
    when: str | None = None
    """``replaced`` or ``not applied``; None for the score that counts and its parts."""
    judge: str | None = None
    reply: Shown | None = None
    details: Shown | None = None


def verdicts_of(record: Record) -> list[Verdict]:
    """Return the score that counts with its parts, then later and earlier ones."""
    found = []
    if record.score is not None or record.score_details:
        found += list(_verdicts(record.score, record.score_details, None))
    if record.rescored is not None:
        details = record.rescored.get("details") or {}
        found += list(_verdicts(record.rescored.get("score"), details, "later, not applied"))
    for earlier in reversed(record.score_history):
        found += list(_verdicts(earlier.get("score"), earlier.get("details") or {}, "replaced"))
    if record.reported_reward is not None:
        reported = record.reported_reward
        found += list(_verdicts(reported.score, reported.details, "reported by the agent"))
    return found


def _verdicts(score: Any, details: Mapping[str, Any], when: str | None) -> Iterator[Verdict]:
    yield _verdict(str(details.get("scorer", "score")), score, details, when)
    parts = details.get("parts")
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        if isinstance(part, Mapping):
            yield _verdict(str(name), part.get("score"), part, when)


def _verdict(scorer: str, score: Any, details: Mapping[str, Any], when: str | None) -> Verdict:
    rest = {key: value for key, value in details.items() if key not in _HEAD}
    judge = details.get("judge")
    return Verdict(
        scorer=scorer,
        score=float(score) if isinstance(score, (int, float)) else None,
        when=when,
        judge=None if judge is None else str(judge),
        reply=None if judge is None else shown(details.get("reply", "")),
        details=shown(json.dumps(rest, ensure_ascii=False, default=str, indent=1)) if rest else None,
    )
