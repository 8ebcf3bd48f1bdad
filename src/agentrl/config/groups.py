"""Flags that turn the scores of a group into advantages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.config.fields import flag, require, require_positive

RIGHT_THRESHOLD = 0.5
"""Default of ``--right_threshold``."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """How the scores of a group become advantages."""

    advantage: str = flag(
        "leave_one_out",
        "advantage estimator: leave_one_out, grpo, dr_grpo, reward (the score, without a baseline), or your"
        " own as module:name",
    )
    adv_scaling: float = flag(1.0, "factor on every advantage")
    right_threshold: float = flag(RIGHT_THRESHOLD, "a trajectory is right when its score is above this")
    clamp_advantage_by_score: bool = flag(False, "A ≤ 0 for score ≤ --right_threshold, else A ≥ 0")
    balance_sample: bool = flag(False, "keep at most one wrong and two right ones beyond the smaller side")
    drop_zero_advantage: bool = flag(True, "calls with advantage 0 are not trained")
    minimal_advantage: float = flag(0.0, "calls whose |advantage| is below this are not trained")
    min_turns: int = flag(1, "right answers in fewer model calls than this are not trained")
    efficient_rewarding: bool = flag(False, "adjust scores by rank of turns within right and wrong answers")
    reserve_context_error_count: int = flag(-1, "context errors kept per group (-1: all)")
    group_filter: str | None = flag(
        None, "filter of your own, a name or module:function, that drops trajectories before all other rules"
    )
    min_score_spread: float = flag(0.1, "a group whose scores differ by less is abandoned")
    overlong_limit: int = flag(0, "generated tokens from which a trajectory's reward is lowered most")
    overlong_buffer: int = flag(0, "tokens before --overlong_limit over which the penalty grows (0: none)")
    overlong_penalty: float = flag(1.0, "what is taken from the reward of a trajectory at --overlong_limit")

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.right_threshold),
            f"--right_threshold is {self.right_threshold}",
            "give a number between the scores of wrong and right answers, such as 0.5",
        )
        require(self.overlong_buffer >= 0, f"--overlong_buffer is {self.overlong_buffer}", "0 turns it off")
        require(
            self.overlong_buffer == 0 or self.overlong_limit >= self.overlong_buffer,
            f"--overlong_buffer {self.overlong_buffer} is longer than --overlong_limit {self.overlong_limit}",
            "give --overlong_limit, the generated tokens of a whole trajectory that are too many",
        )
        require_positive(self, "overlong_penalty")
