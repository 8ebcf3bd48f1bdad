"""Arrange the texts, the scores and the times of a trajectory for its page; the templates escape them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from agentrl.documents.images import text_of
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record

_HEAD = ("scorer", "score", "judge", "reply", "parts")
MAX_CHARS: Final = 20_000
"""Characters of one text on a page; a link leads to the whole."""
_LINE = 100


@dataclass(frozen=True, slots=True)
class Shown:
    """The beginning of a text. ``chars`` counts the characters of the whole."""

    text: str
    chars: int

    @property
    def is_cut(self) -> bool:
        """Return whether the page shows only the beginning."""
        return self.chars > len(self.text)


def shown(value: object) -> Shown:
    """Return the beginning of a text for a page."""
    text = str(value)
    return Shown(text[:MAX_CHARS], len(text))


def content_text(content: Any) -> str:
    """Return the text of a message's content, whatever a client has sent."""
    if content is None or isinstance(content, (str, list)):
        return text_of(content)
    return json_text(content)


def call_text(call: Any) -> str:
    """Return a tool call as ``→ name(arguments)``."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    return f"→ {function.get('name', '?')}({json_text(function.get('arguments'))})"


def json_text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON: on one line if it is short."""
    if isinstance(value, str):
        return value
    is_short = len(str(value)) < _LINE
    return json.dumps(value, ensure_ascii=False, default=str, indent=None if is_short else 1)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One thing that took time. ``start`` and ``end`` are fractions of the whole, from 0 to 1."""

    what: str
    kind: str
    """``generate``, ``tool`` or ``score``."""
    turn: int | None
    seconds: float
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """The bars of a trajectory over ``seconds``, in the order in which they began."""

    seconds: float
    bars: Sequence[Bar]


def waterfall_of(record: Record, calls: Sequence[DispatchedSamplingTask]) -> Waterfall:
    """Return the bars of a trajectory.

    A model call is stored when its tools have ended: its bars are counted back from then. Tools of a turn
    that ran at the same time share the turn's tool time.
    """
    begun = record.created_at
    spans: list[tuple[str, str, int | None, datetime, datetime]] = []
    for call in calls:
        tools = timedelta(seconds=max(call.tool_seconds, 0.0))
        generated = call.created_at - tools
        start = generated - timedelta(seconds=max(call.generate_seconds, 0.0))
        spans.append((f"turn {call.index + 1}", "generate", call.index + 1, start, generated))
        if call.tool_executions:
            names = ", ".join(dict.fromkeys(execution.name for execution in call.tool_executions))
            spans.append((names, "tool", call.index + 1, generated, call.created_at))
    if (scored := record.first_scored_at) is not None and record.completed_at is not None:
        spans.append(("scoring", "score", None, record.completed_at, max(record.completed_at, scored)))
    first = min([begun, *(span[3] for span in spans)])
    last = max([begun, *(span[4] for span in spans)])
    whole = max((last - first).total_seconds(), 1e-3)
    bars = [
        Bar(
            what=what, kind=kind, turn=turn, seconds=(end - start).total_seconds(),
            start=(start - first).total_seconds() / whole, end=(end - first).total_seconds() / whole,
        )
        for what, kind, turn, start, end in sorted(spans, key=lambda span: span[3])
    ]  # fmt: skip
    return Waterfall(seconds=whole, bars=bars)
