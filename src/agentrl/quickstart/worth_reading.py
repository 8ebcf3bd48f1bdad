"""Choose the trajectories of a run that a person reads first, and show an excerpt of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.observe.terminal import excerpt
from agentrl.store.views.read import WholeTrajectory
from agentrl.store.views.rows import TrajectoryRow

if TYPE_CHECKING:
    from agentrl.store.client import Store

RIGHT = 0.5
"""A trajectory is right when its score is above this."""

EXCERPT_CHARS = 96


@dataclass(frozen=True)
class WorthReading:
    """One trajectory: why it is worth reading, and a few lines of it."""

    title: str
    record_id: str
    score: float
    version: int | None
    """The oldest policy version of its tokens."""
    tokens: int
    """Generated tokens."""
    lines: tuple[str, ...]


async def read_worth_reading(store: Store) -> list[WorthReading]:
    """Return the first wrong, the first right and the longest trajectory of the train split."""
    found = []
    for title, row in choose_worth_reading(await store.views.trajectories(split="train")):
        whole = await store.views.whole_trajectory(row.id)
        if whole is None or row.score is None:
            continue
        found.append(
            WorthReading(
                title, row.id, row.score, row.min_version, row.generated_tokens, excerpt_lines(whole)
            )
        )
    return found


def choose_worth_reading(rows: Sequence[TrajectoryRow]) -> list[tuple[str, TrajectoryRow]]:
    """Return up to three different trajectories with a score, each with its title."""
    scored = sorted((row for row in rows if row.score is not None), key=lambda row: (row.created_at, row.id))
    wrong = next((row for row in scored if (row.score or 0.0) <= RIGHT), None)
    right = next((row for row in scored if (row.score or 0.0) > RIGHT), None)
    others = [row for row in scored if row not in (wrong, right)]
    longest = max(others, key=lambda row: row.generated_tokens, default=None)
    named = (("first wrong", wrong), ("first right", right), ("longest", longest))
    return [(title, row) for title, row in named if row is not None]


def excerpt_lines(whole: WholeTrajectory) -> tuple[str, ...]:
    """Return the question, each model call with its tool results, and the expected answer, a line each."""
    lines = [f"question  {excerpt(whole.record.query, EXCERPT_CHARS)}"]
    for call in whole.calls:
        said = call.response.get("content") or ""
        asked = [
            f"{execution.name}({json.dumps(execution.arguments, ensure_ascii=False)}) = {execution.text}"
            for execution in call.tool_executions
        ]
        shown = " ".join([str(said), *asked]).strip() or call.error or "(no text)"
        lines.append(f"model     {excerpt(shown, EXCERPT_CHARS)}")
    if whole.record.final_answer != whole.record.answer:
        lines.append(f"expected  {excerpt(whole.record.answer, EXCERPT_CHARS)}")
    return tuple(lines)
