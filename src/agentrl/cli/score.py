"""``agentrl score``: score sampled trajectories that wait for a score. Start as many as you like."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agentrl.config.load import parse
from agentrl.config.schema import ClaimConfig, RunConfig, SamplingConfig, TraceConfig, flag


@dataclass(frozen=True, kw_only=True)
class ScoreFlags:
    """Which trajectories to score, and when to end."""

    split: str = flag("train", "the split whose trajectories are scored")
    until_empty: bool = flag(False, "end when no trajectory waits for a score (default: at a signal)")


def main(argv: list[str]) -> int:
    """Score until a signal stops it, or with ``--until_empty`` until nothing waits."""
    configs = parse(
        argv,
        command="agentrl score",
        description="Scores trajectories that are sampled and wait for a score: their scorer failed, a judge"
        " was down, or their sampler ended.",
        shown=[RunConfig, SamplingConfig, ClaimConfig, TraceConfig],
        extra=[ScoreFlags],
    )
    from agentrl.observe.logging import setup
    from agentrl.observe.tracing import tracing
    from agentrl.rollout.scoring import score

    setup(configs[RunConfig], "score")
    flags = configs[ScoreFlags]
    with tracing(configs, "score"):
        scored = asyncio.run(score(configs, flags.split, until_empty=flags.until_empty))
    print(f"{scored} trajectories scored")
    return 0
