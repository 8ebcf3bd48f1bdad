"""TokenStatistics: what one optimizer step computed of each token that it trained of one trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agentrl.documents.base import Document, Root

BYTES_PER_TOKEN: Final = 4
"""Packed bytes of one token: two float16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan(Document):
    """Tokens ``[start, end)`` of ``DBRecordData.input_ids``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics(Root):
    """Log-ratios and entropies of one trajectory in one step. ``id`` is ``record@train_step``.

    They are those of the first pass over the step's data, before the update that trains the token. The
    document is for display: nothing reads it in training, and it may be missing.
    """

    id: str
    record: str
    train_step: str
    """``_id`` of the TrainStep."""
    step: int
    spans: tuple[TokenSpan, ...]
    """The tokens that the step trained, in the order of the packed values."""
    log_ratios: bytes
    """float16, log πθ − log μ of each token, in nats."""
    entropies: bytes
    """float16, entropy of the policy's distribution at each token, in nats."""

    def problem(self, tokens: int) -> str | None:
        """Return why the values do not fit training data of ``tokens`` tokens; None if they do."""
        end = max((span.end for span in self.spans), default=0)
        if end > tokens or any(not 0 <= span.start < span.end for span in self.spans):
            return f"a span is outside {tokens} tokens"
        count = sum(span.end - span.start for span in self.spans)
        packed = {len(self.log_ratios), len(self.entropies)}
        return None if packed == {2 * count} else f"{count} tokens have {sorted(packed)} packed bytes"


def statistics_key(record: str, train_step: str) -> str:
    """Return the ``_id`` of a trajectory's statistics in a step."""
    return f"{record}@{train_step}"
