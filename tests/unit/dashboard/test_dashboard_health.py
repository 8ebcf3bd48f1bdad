"""The verdict on a run: what is wrong, and when nothing is."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agentrl.dashboard.health import findings, seconds_since_step, state
from agentrl.dashboard.run_data import RunData
from agentrl.documents.outage import Outage
from agentrl.documents.run import TrainerLease
from agentrl.documents.serving import InferenceService
from agentrl.documents.status import ServiceStatus, StepStatus, TrainerEnd
from agentrl.store.services import Liveness
from agentrl.store.views.overview import StepPoint
from agentrl.store.views.rows import FailureCount

AT = datetime(2026, 1, 1, 12, tzinfo=UTC)
GOOD = {"reward": 0.5, "kl_k3": 0.001, "entropy": 0.5, "effective_sample_size": 0.98, "masked_fraction": 0.01,
        "abandoned_groups": 0.3, "grad_norm": 0.4, "loss": 0.0}  # fmt: skip


def _steps(count: int = 20, **last: float) -> list[StepPoint]:
    """Steps of ten seconds each, the last of them now; ``last`` changes the metrics of the last five."""
    return [
        StepPoint(
            id=f"1/{number}", step=number, status=StepStatus.COMMITTED, policy_version=number - 1, owner="t",
            planned_at=AT, committed_at=AT - timedelta(seconds=10 * (count - number)),
            metrics={**GOOD, "reward": 0.3 + 0.01 * number, **(last if number > count - 5 else {})},
        )
        for number in range(1, count + 1)
    ]  # fmt: skip


def _engine(age: float = 1.0) -> InferenceService:
    return InferenceService(
        id="e", url="http://e", engine="local", model="m", status=ServiceStatus.READY, host="h", pid=1,
        heartbeat=AT - timedelta(seconds=age),
    )  # fmt: skip


def _run(**changes: Any) -> RunData:
    liveness = Liveness(
        at=AT, claims={"s": 4}, last_claim=AT, engines=(_engine(),), outages=(), waiting_for_score=0,
        alive_seconds=10.0,
    )  # fmt: skip
    healthy = RunData(
        steps=_steps(), planned=None, tasks={"train": {"completed": 5, "running": 3}},
        records={"train": {"ready": 100}}, data={"trained": 100}, quarantined_because=None, failures=(),
        liveness=replace(liveness, **changes.pop("liveness", {})), engines=(),
        lease=TrainerLease(owner="t", lease_expires_at=AT + timedelta(seconds=30)), past_outages=(),
        evaluations=(), settings=(), configurations=(),
    )  # fmt: skip
    return replace(healthy, **changes)


def test_a_healthy_run_has_no_finding() -> None:
    assert findings(_run()) == []
    assert state(_run()) == ("training", "good")
    assert seconds_since_step(_run()) == 0.0


@pytest.mark.parametrize(
    ("changes", "severity", "says"),
    [
        ({"liveness": {"engines": (_engine(60.0),)}}, "bad", "no inference engine is alive; 1 fell silent"),
        ({"liveness": {"engines": (_engine(), _engine(60.0))}}, "warn", "1 of 2 engines"),
        ({"liveness": {"claims": {}}}, "warn", "no sampler holds a trajectory"),
        ({"lease": TrainerLease()}, "warn", "no trainer runs"),
        ({"lease": TrainerLease(), "liveness": {"claims": {}}}, "warn", "3 of its tasks are unfinished"),
        ({"liveness": {"at": AT + timedelta(seconds=61), "engines": (_engine(-61),)},
          "lease": TrainerLease(owner="t", lease_expires_at=AT + timedelta(hours=1))}, "warn", "last step"),
        ({"steps": _steps(kl_k3=0.1)}, "warn", "KL(μ‖π) is 0.100"),
        ({"steps": _steps(kl_k3=0.9)}, "bad", "KL(μ‖π) is 0.900"),
        ({"steps": _steps(effective_sample_size=0.2)}, "warn", "effective sample size is 20 %"),
        ({"steps": _steps(masked_fraction=0.5)}, "warn", "50 % of the tokens are masked"),
        ({"steps": _steps(entropy=0.01)}, "warn", "the entropy fell from 0.500 to 0.010"),
        ({"steps": _steps(abandoned_groups=0.95)}, "warn", "95 % of the groups agree"),
        ({"steps": _steps(grad_norm=40.0)}, "warn", "the gradient norm jumped to 40"),
        ({"steps": _steps(reward=0.2)}, "warn", "the reward has fallen to 0.200"),
        ({"steps": _steps(loss=float("nan"))}, "bad", "not finite"),
        ({"records": {"train": {"ready": 90, "failed": 10}},
          "failures": (FailureCount(kind="tool", count=10, message="gone", record="r"),)},
         "warn", "10 % of 100 attempts failed; most often tool: gone"),
        ({"records": {"train": {"ready": 5, "failed": 5}}}, "bad", "50 % of 10 attempts"),
        ({"data": {"quarantined": 2}, "quarantined_because": "token 7"}, "warn", "2 trajectories must"),
    ],
)  # fmt: skip
def test_each_fault_is_named(changes: dict[str, Any], severity: str, says: str) -> None:
    [finding] = findings(_run(**changes))
    assert (finding.severity, says in finding.what) == (severity, True), finding.what
    assert finding.hint


def test_a_run_that_is_solved_may_lose_its_entropy() -> None:
    assert findings(_run(steps=_steps(entropy=0.01, pass_rate=0.98))) == []
    assert findings(_run(steps=_steps(entropy=0.01, pass_rate=0.5)))


def test_an_outage_that_several_samplers_see_is_one_finding_and_comes_first() -> None:
    outages = [
        Outage(
            id=name,
            dependency="tool server search",
            by=name,
            why="refused",
            held=3,
            began_at=AT - timedelta(seconds=age),
        )
        for name, age in (("a", 120), ("b", 60))
    ]
    found = findings(_run(liveness={"outages": outages}, steps=_steps(kl_k3=0.1)))
    assert [finding.severity for finding in found] == ["bad", "warn"]
    assert "tool server search is down for 2 min 0 s; 6 calls wait for it: refused" in found[0].what


def test_a_finished_run_is_not_a_fault_and_a_stopped_one_is() -> None:
    quiet: dict[str, Any] = {"claims": {}, "engines": (_engine(60.0),)}
    finished = _run(lease=TrainerLease(ended=TrainerEnd.FINISHED), liveness=quiet)
    assert findings(finished) == []
    assert state(finished) == ("finished", "good")

    stopped = _run(lease=TrainerLease(ended=TrainerEnd.STOPPED), liveness=quiet)
    [finding] = findings(stopped)
    assert finding.what == "the trainer was stopped, and 3 of its tasks are unfinished"
    assert state(stopped) == ("stopped", "warn")

    [finding] = findings(_run(lease=TrainerLease(ended=TrainerEnd.FINISHED)))
    assert "samplers still begin trajectories" in finding.what


def test_a_trainer_that_started_again_is_not_finished() -> None:
    lease = TrainerLease(owner="t", lease_expires_at=AT + timedelta(seconds=30), ended=TrainerEnd.FINISHED)
    assert state(_run(lease=lease)) == ("training", "good")


def test_states() -> None:
    idle = {"lease": TrainerLease(), "liveness": {"claims": {}}}
    assert state(_run(**idle)) == ("stopped", "warn")
    assert state(_run(**idle, tasks={"train": {"completed": 8}})) == ("ended", "")
    assert state(_run(**idle, tasks={})) == ("empty", "")
    assert state(_run(lease=TrainerLease()))[0] == "sampling, no trainer"
    assert state(_run(liveness={"claims": {}}))[0] == "trainer only"
    assert findings(_run(**idle, tasks={"train": {"completed": 8}})) == []
