"""Place the model calls, tools and scoring of a trajectory on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record


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
    if (scored := _first_scored_at(record)) is not None and record.completed_at is not None:
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


def _first_scored_at(record: Record) -> datetime | None:
    """Return when the first score was written; a later rescoring does not count."""
    earlier = record.score_history[0].get("scored_at") if record.score_history else None
    return earlier if isinstance(earlier, datetime) else record.scored_at
