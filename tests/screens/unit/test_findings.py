"""The verdict on a run: what is wrong, and when nothing is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from snapshots import NOW, engine, snapshot, steps

from agentrl.documents.run import GoldScore, JudgeCheck, Outage, TrainerLease
from agentrl.documents.status import TrainerEnd
from agentrl.screens.snapshot import findings, seconds_since_step, state
from agentrl.screens.views.counts import AnswersSeen, Continued, FailureCount


def test_a_healthy_run_has_no_finding() -> None:
    assert findings(snapshot()) == []
    assert state(snapshot()) == ("training", "good")
    assert seconds_since_step(snapshot()) == 0.0


@pytest.mark.parametrize(
    ("changes", "severity", "says"),
    [
        ({"liveness": {"engines": (engine(60.0),)}}, "bad", "no inference engine is alive; 1 fell silent"),
        ({"liveness": {"engines": (engine(), engine(60.0))}}, "warn", "1 of 2 engines"),
        ({"liveness": {"claims": {}, "listed": ()}}, "warn", "no sampler is alive"),
        ({"lease": TrainerLease()}, "warn", "no trainer runs"),
        ({"lease": TrainerLease(), "liveness": {"claims": {}, "listed": ()}}, "warn",
         "3 of its tasks are unfinished"),
        ({"liveness": {"at": NOW + timedelta(seconds=61), "engines": (engine(-61),)},
          "lease": TrainerLease(owner="t", lease_expires_at=NOW + timedelta(hours=1))}, "warn", "last step"),
        ({"steps": steps(kl_k3=0.1)}, "warn", "KL(μ‖π) is 0.100"),
        ({"steps": steps(kl_k3=0.9)}, "bad", "KL(μ‖π) is 0.900"),
        ({"steps": steps(effective_sample_size=0.2)}, "warn", "effective sample size is 20 %"),
        ({"steps": steps(masked_fraction=0.5)}, "warn", "50 % of the tokens are masked"),
        ({"steps": steps(entropy=0.01)}, "warn", "the entropy fell from 0.500 to 0.010"),
        ({"steps": steps(abandoned_groups=0.95)}, "warn", "95 % of the groups agree"),
        ({"steps": steps(grad_norm=40.0)}, "warn", "the gradient norm jumped to 40"),
        ({"steps": steps(reward=0.2)}, "warn", "the reward has fallen to 0.200"),
        ({"steps": steps(loss=float("nan"))}, "bad", "not finite"),
        ({"records": {"train": {"ready": 90, "failed": 10}},
          "failures": (FailureCount(kind="tool", count=10, message="gone", record="r"),)},
         "warn", "10 % of 100 attempts failed; most often tool: gone"),
        ({"records": {"train": {"ready": 5, "failed": 5}}}, "bad", "50 % of 10 attempts"),
        ({"data": {"train": {"quarantined": 2}}, "quarantined_because": "token 7"},
         "warn", "2 trajectories must"),
        ({"answers_seen": (AnswersSeen(tool="search", count=7, record="r"),)}, "warn",
         "stands in tool results of 7 trajectories, before the model wrote any of it: search 7"),
        ({"continued": Continued(poison=2)}, "warn", "2 trajectories failed as poison"),
        ({"continued": Continued(trajectories=10, diverged=3, dropped=7)}, "warn",
         "3 of 10 trajectories that went on in another process diverged"),
    ],
)  # fmt: skip
def test_each_fault_is_named(changes: dict[str, Any], severity: str, says: str) -> None:
    [finding] = findings(snapshot(**changes))
    assert (finding.severity, says in finding.what) == (severity, True), finding.what
    assert finding.hint


def test_a_run_that_is_solved_may_lose_its_entropy() -> None:
    assert findings(snapshot(steps=steps(entropy=0.01, pass_rate=0.98))) == []
    assert findings(snapshot(steps=steps(entropy=0.01, pass_rate=0.5)))


def test_an_outage_that_several_samplers_see_is_one_finding_and_comes_first() -> None:
    began = {"a": NOW - timedelta(minutes=2), "b": NOW - timedelta(minutes=1)}
    outages = [
        Outage(id=name, dependency="tool server search", by=name, why="refused", held=3, began_at=at)
        for name, at in began.items()
    ]
    found = findings(snapshot(liveness={"outages": outages}, steps=steps(kl_k3=0.1)))
    assert [finding.severity for finding in found] == ["bad", "warn"]
    assert "tool server search is down for 2 min 0 s; 6 calls wait for it: refused" in found[0].what


def test_a_finished_run_is_not_a_fault_and_a_stopped_one_is() -> None:
    quiet: dict[str, Any] = {"claims": {}, "listed": (), "engines": (engine(60.0),)}
    finished = snapshot(lease=TrainerLease(ended=TrainerEnd.FINISHED), liveness=quiet)
    assert findings(finished) == []
    assert state(finished) == ("finished", "good")

    stopped = snapshot(lease=TrainerLease(ended=TrainerEnd.STOPPED), liveness=quiet)
    [finding] = findings(stopped)
    assert finding.what == "the trainer was stopped, and 3 of its tasks are unfinished"
    assert state(stopped) == ("stopped", "warn")

    [finding] = findings(snapshot(lease=TrainerLease(ended=TrainerEnd.FINISHED)))
    assert "samplers still begin trajectories" in finding.what


def test_a_trainer_that_started_again_is_not_finished() -> None:
    lease = TrainerLease(owner="t", lease_expires_at=NOW + timedelta(seconds=30), ended=TrainerEnd.FINISHED)
    assert state(snapshot(lease=lease)) == ("training", "good")


def test_states() -> None:
    idle = {"lease": TrainerLease(), "liveness": {"claims": {}, "listed": ()}}
    assert state(snapshot(**idle)) == ("stopped", "warn")
    assert state(snapshot(**idle, tasks={("train", 0): {"completed": 8}})) == ("ended", "")
    assert state(snapshot(**idle, tasks={})) == ("empty", "")
    assert state(snapshot(lease=TrainerLease()))[0] == "sampling, no trainer"
    assert state(snapshot(liveness={"claims": {}, "listed": ()}))[0] == "trainer only"
    assert findings(snapshot(**idle, tasks={("train", 0): {"completed": 8}})) == []


def gold(step: int, *scores: float | None, model: str = "m1", digest: str = "d") -> JudgeCheck:
    """What the judge gave a slice at ``step``, of which people gave 1 and 0; None: it gave no answer."""
    rows = [
        GoldScore(scorer="agentcpm", expected=people, score=score, model=None if score is None else model)
        for score, people in zip(scores, (1.0, 0.0), strict=True)
    ]
    return JudgeCheck(
        id=f"{digest}/{step}", digest=digest, step=step, owner="s", lease_expires_at=NOW, scores=tuple(rows),
        finished_at=NOW,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("checks", "says"),
    [
        ([gold(0, 1.0, 0.0)], None),
        ([gold(0, 1.0, 0.0), gold(50, 0.95, 0.05)], None),
        ([gold(0, 1.0, 0.0), gold(50, 0.0, 1.0)], "and gave 0.500 at step 0; a row differs by 1.000"),
        ([gold(0, 0.0, 1.0)], "people gave 0.500; a row differs by 1.000"),
        ([gold(0, 1.0, 0.0), gold(50, 1.0, 1.0, model="m2")],
         "the judge agentcpm (m2) gives the gold slice 1.000 at step 50, and gave 0.500 at step 0 by m1"),
        ([gold(0, 1.0, 0.0), gold(50, 1.0, 1.0)], "gave 0.500 at step 0"),
        ([gold(0, 1.0, 0.0), gold(50, 1.0, None), gold(100, None, None)], None),  # a failure is no drift
        ([gold(0, 0.9, 0.9)], "gives the gold slice 0.900 at step 0, and people gave 0.500"),
        ([gold(0, 1.0, 1.0), gold(50, 1.0, 0.0, digest="other")], None),  # another file
        ([gold(0, None, None)], None),
    ],
)  # fmt: skip
def test_a_judge_that_changes_is_named(checks: list[JudgeCheck], says: str | None) -> None:
    found = findings(snapshot(judge_checks=checks))
    assert len(found) == (says is not None)
    assert says is None or says in found[0].what
