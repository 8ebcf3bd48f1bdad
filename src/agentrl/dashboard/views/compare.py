"""Find where two trajectories of a group part: the first turn, and the character in it, that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from agentrl.dashboard.views.text import MAX_CHARS, call_text, content_text
from agentrl.documents.model_call import DispatchedSamplingTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one trajectory generated in a turn: the beginning that both share, and the rest."""

    same: str
    rest: str
    chars: int

    @property
    def is_cut(self) -> bool:
        """Return whether the page shows only the beginning."""
        return self.chars > MAX_CHARS


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPair:
    """The same turn of two trajectories; a side is None where its trajectory has ended."""

    number: int
    left: Side | None
    right: Side | None
    is_same: bool
    parts_here: bool
    """Whether it is the first turn that differs."""


def pair_turns(
    left: Sequence[DispatchedSamplingTask], right: Sequence[DispatchedSamplingTask]
) -> list[TurnPair]:
    """Return the turns of two trajectories side by side."""
    pairs: list[TurnPair] = []
    has_parted = False
    for number, (one, other) in enumerate(zip_longest(left, right), 1):
        texts = [None if call is None else _generated(call) for call in (one, other)]
        is_same = texts[0] == texts[1]
        shared = _shared(*(text or "" for text in texts)) if not has_parted else 0
        pairs.append(
            TurnPair(
                number=number,
                left=_side(texts[0], shared),
                right=_side(texts[1], shared),
                is_same=is_same,
                parts_here=not is_same and not has_parted,
            )
        )
        has_parted = has_parted or not is_same
    return pairs


def _side(text: str | None, shared: int) -> Side | None:
    if text is None:
        return None
    cut = text[:MAX_CHARS]
    return Side(same=cut[:shared], rest=cut[shared:], chars=len(text))


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with together."""
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _generated(call: DispatchedSamplingTask) -> str:
    """Return what the model generated in a turn, and what its tools answered, as text."""
    parts = [content_text(call.response.get(name)) for name in ("reasoning_content", "content")]
    parts += map(call_text, call.response.get("tool_calls") or ())
    parts += [f"← {execution.text}" for execution in call.tool_executions]
    return "\n".join(filter(None, parts))
