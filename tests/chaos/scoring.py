"""The scorer of a run under fire: it takes its time, so that faults find trajectories under way."""

from __future__ import annotations

import asyncio

from agentrl.scoring.scorers import ScorerContext
from chaos.trainer_kills import hashed_score

LONGEST_SECONDS = 4.0


async def slow_score(context: ScorerContext) -> float:
    """A score in [0, 1) that the trajectory's last text decides, and so does the wait before it."""
    score = await hashed_score(context)
    await asyncio.sleep(LONGEST_SECONDS * (score * 997 % 1))
    return score
