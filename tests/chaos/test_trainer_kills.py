"""A trainer that is killed repeatedly trains the same as one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.trainer_kills import GENERATIONS, GROUPS_PER_STEP, Plan, compare

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.usefixtures("starts_warm")]


def test_three_kills_change_nothing(tmp_path: Path) -> None:
    plan = Plan(kills=3, steps=6, seed=3, folder=tmp_path)
    undisturbed, killed, kills = compare(plan)
    assert kills == 3
    assert killed == undisturbed
    assert [step for step, _, _ in killed.steps] == [1, 2, 3, 4, 5, 6]
    assert set(killed.counts.values()) == {1}
    assert len(killed.counts) == 6 * GROUPS_PER_STEP * GENERATIONS
    assert killed.off_policy == ()
    assert [(version, step) for version, step, _, _ in killed.versions] == [(n, n) for n in range(7)]
    assert all(digest for version, _, _, digest in killed.versions if version)
