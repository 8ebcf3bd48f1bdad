"""Which processes ``scripts/eval.sh`` and the training scripts start for evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.cli import launch
from agentrl.cli.launch import Plan


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags that need neither the demo's model nor a database."""
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"id": "a", "query": "1+1?", "answer": "2", "tools": []}))
    for name in ("MODEL_PATH", "ROLES", "SAMPLERS", "ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODEL_PATH", str(tmp_path))
    return ["--run_name", "r", "--eval_file", str(file), "--db_connection_string", "mongodb://127.0.0.1:9"]


def plan_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> Plan:
    plans: list[Plan] = []

    def run(plan: Plan) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(launch, "_run", run)
    assert launch.main(list(words)) == 0
    return plans[0]


def test_an_evaluation_uses_the_engine_of_the_script_or_one_of_its_own(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(monkeypatch, "eval", *given)
    assert (plan.engines, plan.samplers) == (1, 0)
    assert plan.flags[:2] == ["--eval_engine", "shared"]
    own = plan_of(monkeypatch, "eval", *given, "--eval_model", "m")
    assert own.engines == 0
    assert "shared" not in own.flags


def test_versions_are_evaluated_beside_training_on_request(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not plan_of(monkeypatch, "train", *given).follows
    plan = plan_of(monkeypatch, "train", *given, "--eval_steps", "5")
    assert plan.follows
    assert (plan.engines, plan.samplers) == (1, 2)
