"""The tables of ``agentrl audit run`` and their JSON, from a hand-made snapshot."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

from snapshots import NOW, engine, printed, rows, snapshot, step_row, steps

from agentrl.documents.run import Evaluation, Outage, PolicyVersion, TrainerLease
from agentrl.documents.status import EvaluationStatus, ServiceStatus, StepStatus
from agentrl.screens.run_screens import render_tables, tables_json
from agentrl.screens.views.counts import (
    DataCount,
    EnvironmentCount,
    FailureCount,
    GroupCount,
    LengthBias,
    PromptTokens,
    RunDetails,
)
from agentrl.screens.views.pipelines import EngineRow


def engine_row(name: str, port: int, **changes: Any) -> EngineRow:
    """The row of a live engine."""
    fields: dict[str, Any] = {
        "engine": "local", "model": "train-model", "host": "h", "pid": 1, "status": ServiceStatus.READY,
        "started_at": NOW, "heartbeat": NOW - timedelta(seconds=1), **changes,
    }  # fmt: skip
    return EngineRow(id=name, url=f"http://127.0.0.1:{port}", **fields)


def state(**changes: Any) -> str:
    """The page of a run with a live engine, a dead one and one that is stopped."""
    now = NOW
    live = engine_row("e1", 4000, policy_version=7, running_requests=3)
    dead = engine_row("e2", 4001, engine="sglang", heartbeat=now - timedelta(minutes=9))
    stopped = engine_row("e3", 4002, status=ServiceStatus.STOPPED)
    version = PolicyVersion(
        id=7, step=7, location="/out/weights/v000007", files=(), train_step="a/7",
        published_at=now - timedelta(minutes=3),
    )  # fmt: skip
    outage = Outage(
        id="o/1", dependency="judge gpt", by="host-1", why="429", held=2, began_at=now - timedelta(seconds=41)
    )
    run: dict[str, Any] = {
        "tasks": {("train", 0): {"completed": 12, "running": 4}},
        "records": {"train": {"ready": 40, "failed": 3}},
        "failures": [FailureCount(kind="engine", count=3, message="engine [x] \x1b[31mgone\nsecond line")],
        "engines": [live, dead, stopped],
        "liveness": {
            "claims": {"host-1": 3}, "waiting_for_score": 17, "outages": [outage],
            "engines": [engine(1.0, "e1"), engine(540.0, "e2")],
        },
    }  # fmt: skip
    details: dict[str, Any] = {
        "groups": [
            GroupCount(by="order", groups=9, abandoned_groups=6, trajectories=40, trained=10, pass_rate=0.9),
            GroupCount(by="pass_rate", groups=4, abandoned_groups=0, trajectories=0, trained=0, pass_rate=0),
        ],
        "data": [DataCount(status="trained", count=30, tokens=12345, trainable_tokens=2345)],
        "lengths": [
            LengthBias(split="train", sampled=40, sampled_tokens=50.0, trained=30, trained_tokens=45.0)
        ],
        "prompts": [PromptTokens(split="eval", tokens=20_000, cached=17_800)],
        "environments": changes.pop("environments", []), "versions": [version],
        "steps": [step_row(6), step_row(7, status=StepStatus.PLANNED, committed_at=None, metrics={})],
    }  # fmt: skip
    return printed(render_tables(snapshot(**(run | changes)), RunDetails(**details)), 220)


def test_the_state_of_a_run_is_tables() -> None:
    page = state()
    assert "run demo, 2026-11-21 12:00:00 UTC" in page
    assert rows(page, "judge gpt")[1:] == [["judge", "gpt", "41", "s", "ago", "2", "429", "host-1"]]
    assert "17 sampled trajectories wait for a score" in page
    assert rows(page, "train, epoch 0") == [["train,", "epoch", "0", "–", "4", "–", "12", "16"]]
    assert ["engine", "3", "engine", "[x]", "gone", "second", "line"] in rows(page, "engine ")
    assert rows(page, "trained ") == [["trained", "30", "12,345", "2,345"]]
    assert rows(page, "train ")[-1] == ["train", "40", "50.0", "30", "45.0", "0.90"]
    assert rows(page, "eval ") == [["eval", "20,000", "17,800", "0.89"]]
    assert rows(page, "order ") == [["order", "9", "6", "0.67", "40", "30", "0.75", "0.90"]]
    assert rows(page, "pass_rate ") == [["pass_rate", "4", "0", "0.00", "0", "0", "–", "0.00"]]
    assert rows(page, "host-1") == [["host-1", "3"]]
    assert rows(page, "http://127.0.0.1:4000")[0][1:5] == ["local", "ready", "7", "3"]
    assert rows(page, "http://127.0.0.1:4001")[0][1:4] == ["sglang", "dead", "–"]
    assert "4002" not in page
    assert rows(page, "7 ")[-2] == ["7", "7", "published", "3", "min", "ago", "/out/weights/v000007"]
    assert rows(page, "6 ")[0][1:4] == ["committed", "5", "0.600"]
    assert rows(page, "7 ")[-1][1:4] == ["planned", "6", "–"]


def test_tables_without_rows_are_left_out() -> None:
    nothing: dict[str, Any] = {"tasks": {}, "records": {}, "engines": (), "steps": ()}
    details = RunDetails(groups=(), data=(), lengths=(), prompts=(), environments=(), versions=(), steps=())
    run = snapshot(**nothing, lease=TrainerLease(), liveness={"claims": {}, "engines": ()})
    assert run.empty
    assert not snapshot().empty
    assert printed(render_tables(run, details)) == "run demo, 2026-11-21 12:00:00 UTC"
    assert tables_json(run, details)["findings"] == []


def test_what_is_wrong_comes_first() -> None:
    page = state(steps=steps(kl_k3=0.9))
    assert page.index("What is wrong") < page.index("Down now")
    assert "KL(μ‖π) is 0.900 nats a token" in page
    assert "lower --max_staleness" in page


def test_the_json_has_every_key() -> None:
    details = RunDetails(groups=(), data=(), lengths=(), prompts=(), environments=(), versions=(), steps=())
    keys = (
        "run_name tasks records failures groups data lengths prompts samplers outages past_outages"
        " waiting_for_score engines versions steps settings configurations environments evaluations at"
        " state findings parent children"
    )
    value = json.loads(json.dumps(tables_json(snapshot(), details), allow_nan=False))
    assert set(value) == set(keys.split())
    assert value["tasks"] == {"train, epoch 0": {"completed": 5, "running": 3}}


def test_environments_and_evaluations_are_tables() -> None:
    done = Evaluation(
        id="eval-1", status=EvaluationStatus.FINISHED, version=7, step=70, model=None, file="held_out.jsonl",
        tasks_digest="t", settings_digest="s", samples=4, right_threshold=0.5, finished_at=NOW,
        results={"total": {
            "scored": 40, "failed": 1, "score": {"value": 0.5, "low": 0.4, "high": 0.6},
            "pass_at": {"1": {"value": 0.25, "low": None, "high": None}},
        }},
    )  # fmt: skip
    silent = replace(
        done, id="eval-2", status=EvaluationStatus.RUNNING, version=None, model="/models/base", results=None,
        step=None, finished_at=None, seen_at=NOW - timedelta(hours=1),
    )  # fmt: skip
    environment = EnvironmentCount(
        split="train", environment="reasoning_gym", tasks=50, finalized=20, trajectories=160, score=0.31,
        pass_rate=0.25,
    )  # fmt: skip
    page = state(environments=[environment], evaluations=[done, silent])
    assert ["train", "reasoning_gym", "50", "20", "160", "0.310", "0.25"] in rows(page, "train ")
    assert rows(page, "eval-1")[0][:9] == [
        "eval-1", "version", "7", "70", "finished", "held_out.jsonl", "4", "40", "1",
    ]  # fmt: skip
    assert "0.500 [0.400, 0.600]" in page
    assert rows(page, "eval-2")[0][:4] == ["eval-2", "/models/base", "–", "lost:"]
