"""Flags of groups: how their scores become advantages, and what of them is trained."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.flags import Flags, flag, names_in, require

RIGHT_THRESHOLD = 0.5
"""Default of ``--right_threshold``."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Flags):
    """How the scores of a group become advantages."""

    section = "groups"

    advantage: str = flag(
        "leave_one_out",
        "advantage estimator: leave_one_out, grpo, dr_grpo, reward (the score, without a baseline), or your"
        " own as module:name",
    )
    adv_scaling: float = flag(1.0, "factor of every advantage", within="(-inf, inf)")
    right_threshold: float = flag(
        RIGHT_THRESHOLD, "a trajectory counts as right if its score is above this", within="(-inf, inf)"
    )
    clamp_advantage_by_score: bool = flag(
        False, "clamp advantages to A ≤ 0 for score ≤ --right_threshold and to A ≥ 0 otherwise"
    )
    balance_sample: bool = flag(
        False, "keep at most one wrong and two right trajectories more than the smaller side has"
    )
    drop_zero_advantage: bool = flag(True, "do not train model calls with advantage 0")
    minimal_advantage: float = flag(
        0.0, "do not train model calls whose |advantage| is below this", within="[0, inf)"
    )
    min_turns: int = flag(
        1,
        "do not train right trajectories with fewer model calls than this",
        within="[1, inf)",
        unit="model calls",
    )
    efficient_rewarding: bool = flag(
        False, "adjust scores by the rank of the number of turns, within right and within wrong trajectories"
    )
    reserve_context_error_count: int = flag(
        -1,
        "trajectories that ended with a context error to keep per group (-1: all)",
        within="[-1, inf)",
        unit="trajectories",
    )
    group_filter: str | None = flag(
        None, "your own filter, a name or module:function, that drops trajectories before all other rules"
    )
    min_score_spread: float = flag(
        0.1, "drop a group whose highest and lowest score differ by less than this", within="[0, inf)"
    )
    overlong_limit: int = flag(
        0,
        "generated tokens of a trajectory from which its reward is lowered by the whole --overlong_penalty",
        within="[0, inf)",
        unit="tokens",
    )
    overlong_buffer: int = flag(
        0,
        "tokens before --overlong_limit over which the penalty grows linearly (0: no penalty)",
        within="[0, inf)",
        unit="tokens",
    )
    overlong_penalty: float = flag(
        1.0, "subtracted from the reward of a trajectory at --overlong_limit", within="(0, inf)"
    )
    columns: str = flag(
        "",
        "columns that a trajectory waits for before it is trained, e.g. teacher (`agentrl teach` fills it)",
    )

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names in ``columns``."""
        return tuple(names_in(self.columns))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.overlong_buffer == 0 or self.overlong_limit >= self.overlong_buffer,
            f"--overlong_buffer {self.overlong_buffer} is longer than --overlong_limit {self.overlong_limit}",
            "give --overlong_limit: generated tokens of a whole trajectory that are too many",
        )
        for name in self.column_names:
            require(
                name.isidentifier(),
                f"--columns has {name!r}",
                "use letters, digits and _ in a name; the columns of a task file are named by --task_fields",
            )
