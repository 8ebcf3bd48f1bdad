"""A run that withdraws trajectories of a trained step ends with the weights of one that never held them."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.retraction import Plan, compare

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]


def test_weights_equal_those_of_a_run_that_never_held_it(mongo_uri: str, tmp_path: Path) -> None:
    plan = Plan(
        steps=5, at=4, withdrawn=3, generations=4, kills=1, seed=1, folder=tmp_path, uri=mongo_uri
    )  # fmt: skip
    result = compare(plan)
    assert result.retracted == result.control
    assert result.retracted[:3] == result.before[:3]
    assert [step[2] for step in result.retracted[3:]] != [step[2] for step in result.before[3:]]
    assert 5 in [step for step, _, _ in result.weights]
    assert [ours for _, ours, _ in result.weights] == [theirs for _, _, theirs in result.weights]
    assert result.found.keys() == {"Tombstone", "exports/archive/Tombstone.jsonl"}
