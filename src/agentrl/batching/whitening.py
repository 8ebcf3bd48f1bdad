"""Batch-whitened advantages: those of a whole step, less their mean, over their standard deviation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agentrl.documents.training import DBRecordData

EPSILON = 1e-8
"""Added to the standard deviation."""

_NOISE = 1e-9
"""A standard deviation below this share of the largest advantage is rounding."""


def whiten(data: Sequence[DBRecordData]) -> tuple[DBRecordData, ...]:
    """Return ``data`` whose spans have the advantages A' = (A − mean) / (std + 1e-8).

    Mean and standard deviation (of the population) are over the trainable tokens of all ``data``, so that a
    span counts with its tokens: REINFORCE++ (arXiv 2501.03262), as OpenRLHF and verl compute it. They are
    exact sums, whatever the order of ``data``. Where all advantages are equal, every A' is 0.
    """
    spans = [span for item in data for span in item.spans]
    tokens = np.array([span.end - span.start for span in spans], dtype=np.float64)
    advantages = np.array([span.advantage for span in spans], dtype=np.float64)
    total = tokens.sum()
    if total == 0:
        return tuple(data)
    centred = advantages - math.fsum(tokens * advantages) / total
    deviation = math.sqrt(math.fsum(tokens * centred**2) / total)
    if deviation <= _NOISE * float(np.abs(advantages).max()):
        centred = np.zeros_like(centred)
    whitened = iter((centred / (deviation + EPSILON)).tolist())
    return tuple(
        replace(item, spans=tuple(replace(span, advantage=next(whitened)) for span in item.spans))
        for item in data
    )
