"""Advantage estimators: by name and path, with checked results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agentrl.config.training import GroupConfig
from agentrl.errors import ConfigError, GroupError
from agentrl.scoring.groups import BUILT_IN, ESTIMATORS, advantage, estimate

RESULT: list[Any] = []


@advantage("scripted", needs_others=False)
def scripted(rewards: Sequence[float]) -> list[Any]:
    """Return what the test has put into ``RESULT``."""
    if RESULT == ["raise"]:
        raise SystemExit("no more")
    return RESULT


def doubled(rewards: Sequence[float]) -> list[float]:
    return [2 * reward for reward in rewards]


def test_the_built_in_estimators_are_known() -> None:
    assert set(ESTIMATORS.names()) >= BUILT_IN
    assert [name for name in sorted(BUILT_IN) if not ESTIMATORS.get(name).needs_others] == ["reward"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("leave_one_out", [1.0, -0.5, -0.5]),
        ("dr_grpo", [2 / 3, -1 / 3, -1 / 3]),
        ("grpo", [1.1547, -0.57735, -0.57735]),
        ("maxrl", [2.0, -1.0, -1.0]),
        ("reward", [1.0, 0.0, 0.0]),
        (f"{__name__}:doubled", [2.0, 0.0, 0.0]),
    ],
)
def test_advantages_of_one_right_answer_in_three(name: str, expected: list[float]) -> None:
    assert estimate(name, [1.0, 0.0, 0.0]) == pytest.approx(expected, abs=1e-5)


def test_a_plain_function_compares_trajectories_and_a_decorated_one_says_so() -> None:
    assert ESTIMATORS.get(f"{__name__}:doubled").needs_others
    assert not ESTIMATORS.get(f"{__name__}:scripted").needs_others
    with pytest.raises(ConfigError, match="cannot be used as advantage estimator"):
        ESTIMATORS.get(f"{__name__}:RESULT")


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ([1.0], "returned 1 advantages for 2 rewards"),
        ([1.0, float("nan")], "returned nan, which is not a finite number"),
        ([1.0, "2"], "returned '2', which is not a finite number"),
        (["raise"], "raised SystemExit: no more"),
    ],
)
def test_what_an_estimator_does_wrong_is_an_error_of_its_group(result: list[Any], problem: str) -> None:
    RESULT[:] = result
    with pytest.raises(GroupError, match=f"advantage estimator scripted {problem}"):
        estimate("scripted", [0.0, 1.0])


def test_maxrl_weighs_a_right_answer_by_its_rarity_and_takes_no_reward_below_0() -> None:
    assert estimate("maxrl", [1.0, 0.0, 0.0, 0.0]) == [3.0, -1.0, -1.0, -1.0]
    assert estimate("maxrl", [1.0, 1.0, 1.0, 0.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert estimate("maxrl", [0.0, 0.0]) == [0.0, 0.0]
    with pytest.raises(GroupError, match=r"reward -0\.5 is below 0") as refused:
        estimate("maxrl", [1.0, -0.5])
    assert "scores of 0 or more" in str(refused.value.hint)
    lowering: list[dict[str, Any]] = [
        {"overlong_limit": 20, "overlong_buffer": 10}, {"efficient_rewarding": True},
    ]  # fmt: skip
    for flags in lowering:
        with pytest.raises(ConfigError, match="lower some below 0"):
            GroupConfig(advantage="maxrl", **flags)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("huge", [1e308, 1e39, 1.1e18, -1e200])
def test_rewards_that_training_cannot_square_are_refused(name: str, huge: float) -> None:
    with pytest.raises(GroupError, match="is beyond"):
        estimate(name, [huge, 0.0, 0.0, 1.0])
    lowest = 0.0 if name == "maxrl" else -1e18
    values = np.array(estimate(name, [1e18, lowest, 0.0, 1.0]), np.float32)
    assert np.isfinite(values * values).all()
