"""Whiten the advantages of a step over all of its trainable tokens (REINFORCE++)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.documents.training import DBRecordData
from agentrl.losses.whitening import whitened


def whiten(data: Sequence[DBRecordData]) -> tuple[DBRecordData, ...]:
    """Return ``data`` whose spans have whitened advantages (``losses.whitening.whitened``).

    A span counts with its trainable tokens. The order of ``data`` changes no value.
    """
    spans = [span for item in data for span in item.spans]
    advantages = iter(whitened([s.advantage for s in spans], [s.end - s.start for s in spans]))
    return tuple(
        replace(item, spans=tuple(replace(span, advantage=next(advantages)) for span in item.spans))
        for item in data
    )
