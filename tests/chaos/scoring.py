"""Scorers of the chaos tests: the score depends only on the trajectory's last text."""

from __future__ import annotations

import asyncio
import hashlib

from agentrl.scoring.scorers import ScorerContext

LONGEST_SECONDS = 4.0


async def hashed_score(context: ScorerContext) -> float:
    """Return a score in [0, 1) computed from the trajectory's last text."""
    text = str(context.messages[-1].get("content", ""))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) / 2**32


async def slow_score(context: ScorerContext) -> float:
    """Return ``hashed_score`` after a delay, so that faults interrupt trajectories that are being scored."""
    score = await hashed_score(context)
    await asyncio.sleep(LONGEST_SECONDS * (score * 997 % 1))
    return score
