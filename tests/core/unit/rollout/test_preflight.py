"""Test that groups of one trajectory are refused if nothing of them would be trained."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config.schema import GroupConfig
from agentrl.errors import ConfigError
from agentrl.rollout.preflight import require_groups


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "no group's scores can differ"),
        ({"advantage": "reward"}, "no group's scores can differ"),
        ({"min_score_spread": 0.0}, "--advantage leave_one_out compares"),
    ],
)
def test_a_group_of_one_is_refused_where_its_score_is_compared(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_groups(GroupConfig(**flags), 1)
    require_groups(GroupConfig(**flags), 2)


def test_a_group_of_one_is_trained_by_its_reward() -> None:
    require_groups(GroupConfig(advantage="reward", min_score_spread=0.0), 1)
