"""Flags of `agentrl blame`: which changes are explained, from which weights, and what is written."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from agentrl.config.flags import Flags, flag, require


@dataclass(frozen=True, kw_only=True)
class BlameConfig(Flags):
    """Which changes are explained, from which weights, and where the ranking goes."""

    section = "blame"

    changes: Literal["fell", "rose", "all"] = flag(
        "fell", "the held-out tasks to explain: those whose mean score fell, rose, or both"
    )
    checkpoints: int = flag(
        10, "weights at which gradients are computed, at most, spread over the steps", within="[1, inf)"
    )
    adam_scale: bool = flag(
        True, "scale gradients as AdamW does, with the moments of the nearest checkpoint, if there is one"
    )
    top: str = flag("5%", "how many trajectories are blamed: a number, or a percentage of all")
    out: str | None = flag(None, "write the ids of the blamed Records to this file, one a line")
    csv: str | None = flag(None, "write every trajectory with its effect to this CSV file")
    label: str | None = flag(
        None, "give the blamed Records this label, by which the dashboard and `agentrl audit records` filter"
    )
    limit: int = flag(20, "trajectories and members of a group shown", within="[1, inf)")
    json: bool = flag(False, "print one JSON value on stdout; progress goes to stderr")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.top_of(100)

    def top_of(self, count: int) -> int:
        """Return how many of ``count`` trajectories are blamed, at least one. ConfigError for a bad --top."""
        found = re.fullmatch(r"(?P<percent>\d+(\.\d+)?)%|(?P<number>\d+)", self.top.strip())
        percent = float(found["percent"] or 0) if found else 0.0
        number = int(found["number"] or 0) if found else 0
        require(
            0 < percent <= 100 or number > 0,
            f"--top is {self.top!r}", "give a number of trajectories above 0, or a percentage such as 5%",
        )  # fmt: skip
        return min(count, number or math.ceil(count * percent / 100))
