"""The cases of ``scripts/bench/learning.py``: their flags are known, and their results read back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from environment_packages import needs_packages

from agentrl.base.user_code import allow
from agentrl.config.load import parse
from agentrl.config.schema import TaskConfig
from agentrl.environments.environment import ENVIRONMENTS
from agentrl.rollout.load_tasks import Address
from agentrl.scoring.evaluation import difference

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "bench"))

from learning import Point, Result, as_json, read_results
from learning_cases import CASES, quick_case


@needs_packages
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_has_tasks_flags_that_exist_and_a_model_or_its_warm_up(case: Any) -> None:
    address = Address.parse(case.address(4, 1))
    allow([address.name])
    assert (address.n, address.seed) == (4, 1)
    assert set(address.options) <= set(ENVIRONMENTS.get(address.name).options)
    for each in (case, quick_case(case)):
        flags = [*each.flags, "--run_name", "x", "--train_file", case.address(4, 1)]
        parsed = parse(flags, command="agentrl sample", description="", shown=())
        assert parsed[TaskConfig].train_file == case.address(4, 1)
    assert (case.model is None) == (case.warm_up is not None)


def test_results_of_several_processes_are_read_back(tmp_path: Path) -> None:
    points = [Point(step=0, score=0.2, low=0.1, high=0.3), Point(step=9, score=0.5, low=0.4, high=0.6)]
    pairs = [(0.0, 0.5), (0.4, 0.5)]
    results = [Result(seed=seed, seconds=60.0, points=points, pairs=pairs) for seed in (0, 1)]
    file = tmp_path / "results.json"
    file.write_text(json.dumps(as_json(CASES["gcd"], results, difference(2 * pairs))))
    assert read_results(file) == results
