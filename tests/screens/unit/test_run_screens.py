"""The screens of a run, from a hand-made snapshot: 80 columns, no control characters, JSON; audit's words."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from snapshots import NOW, engine, printed, rows, sampler, snapshot, step_row, steps
from waiting import cancel

from agentrl.documents.run import (
    Doing,
    Evaluation,
    FileChecksum,
    LiveWeights,
    Outage,
    PolicyVersion,
    ServedVersion,
    TrainerLease,
)
from agentrl.documents.status import (
    EvaluationStatus,
    ServiceStatus,
    StepStatus,
    TrainerEnd,
    VersionStatus,
    Work,
)
from agentrl.errors import ConfigError, StoreUnavailableError
from agentrl.observe.terminal import excerpt
from agentrl.screens import screens_cli as command
from agentrl.screens.run_screens import (
    amount,
    render_run_status,
    render_tables,
    sparkline,
    status_json,
    tables_json,
)
from agentrl.screens.screens_cli import audit
from agentrl.screens.snapshot import RunSnapshot, findings, published_versions
from agentrl.screens.snapshot import state as state_of
from agentrl.screens.views.counts import (
    Continued,
    DataCount,
    EnvironmentCount,
    FailureCount,
    GroupCount,
    LengthBias,
    PromptTokens,
    Rates,
    RunDetails,
)
from agentrl.screens.views.pipelines import EngineRow
from agentrl.store.run_list import Disk, activity_of


def _status(**changes: Any) -> RunSnapshot:
    steps = [
        step_row(
            step, planned_at=NOW - timedelta(minutes=10 - step), reward=step / 10, pass_rate=0.5,
            committed_at=NOW - timedelta(minutes=10 - step), staleness_mean=0.5, staleness_max=1.0,
            metrics={"tokens_per_second": 1234.5, "kl_k3": float("nan")},
        )
        for step in (1, 2, 3)
    ]  # fmt: skip
    outage = Outage(
        id="o", dependency="tool server search", by="host-8", why="refused \x1b[31m[red]", held=3,
        began_at=NOW - timedelta(seconds=30),
    )  # fmt: skip
    liveness = {
        "claims": {"host-8": 12}, "waiting_for_score": 2, "engines": (engine(120.0),), "outages": [outage],
    }  # fmt: skip
    fields: dict[str, Any] = {
        "steps": steps, "liveness": liveness | changes.pop("liveness", {}),
        "tasks": {
            ("train", 0): {"completed": 9}, ("train", 1): {"created": 4, "running": 3, "waiting": 1},
        },
        "data": {"train": {"ready": 16, "planned": 8, "trained": 192}},
        "rates": Rates(
            seconds=300.0, trajectories=40, scored=30, failed=2, generated_tokens=6000, mean_score=0.25
        ),
        "lease": TrainerLease(owner="host-7", host="host", pid=7, lease_expires_at=NOW + timedelta(hours=1)),
        "failures": [FailureCount(kind="tool", count=2, message="\x1b]0;title\x07went\u202e away [b]x[/b]")],
        "disk": Disk(run=3 * 2**30, free=2**40, total=2**41),
    }  # fmt: skip
    return snapshot(**(fields | changes))


def _printed(run: RunSnapshot) -> str:
    return printed(render_run_status(run), 80)


def test_the_screen_fits_80_columns_and_says_what_is_wrong() -> None:
    page = _printed(_status())
    assert max(len(line) for line in page.splitlines()) <= 80
    flat = " ".join(page.split())
    parts = [
        "demo training", "step 3 7 min ago 60 steps/h", "reward 0.300 ▁▄█", "6.0 scored trajectories/min",
        "trainer host-7", "host-8 (12, holding claims)", "http://e local dead",
        "groups: 4 to come, 3 open, 1 to finalize, 9 done; trajectories: 2 to score, 16 ready, 8 planned",
        "tool 2 went away [b]x[/b]", "database 3.0 GiB, 1.0 TiB free on the server",
    ]  # fmt: skip
    assert [part for part in parts if part not in flat] == []
    found = findings(_status())
    assert found[0].what.startswith("tool server search is down for 30.0 s; 3 calls wait for it: refused")
    assert len(found) == 3
    for finding in found:
        assert excerpt(finding.what, 400) in flat
        assert f"→ {finding.hint}" in flat
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_what_went_on_in_another_process_is_summed_up() -> None:
    continued = Continued(
        trajectories=12, died=9, released=4, turns=96, tokens=51_200, tool_seconds=1204.0, diverged=0
    )
    page = _printed(_status(continued=continued))
    assert max(len(line) for line in page.splitlines()) <= 80
    flat = " ".join(page.split())
    assert "continued 12 trajectories in another process (9 owners died, 4 released them);" in flat
    assert "96 turns, 51,200 tokens and 20 min 4 s of tools not repeated" in flat
    assert "diverged" not in flat
    assert status_json(_status(continued=continued), output_free=None)["continued"]["tokens"] == 51_200
    rare = " ".join(
        _printed(_status(continued=Continued(diverged=1, dropped=3, restarted=2, poison=1))).split()
    )
    assert "1 diverged, 3 turns dropped; 2 begun anew; 1 poison" in rare
    assert "continued" not in _printed(_status())


def test_samplers_that_do_not_run_have_their_state_in_each_screen() -> None:
    listed = [
        sampler("a-1"), sampler("b-2", draining_at=NOW), sampler("c-3", draining_at=NOW), sampler("d-4", 60),
    ]  # fmt: skip
    run = snapshot(liveness={"claims": {"a-1": 3, "b-2": 2}, "listed": listed})
    shown = " ".join(_printed(run).split())
    assert "3 with 5 claims: a-1 (3, running), b-2 (2, draining), c-3 (0, draining); 2 draining" in shown
    states = {"a-1": "running", "b-2": "draining", "c-3": "draining", "d-4": "dead"}
    assert status_json(run, output_free=None)["sampler_states"] == states
    assert "samplers: 3, with 5 claims, 1 running, 2 draining" in run.liveness.describe()
    drained = snapshot(liveness={"claims": {}, "listed": [sampler("b-2", asked_at=NOW)]})
    assert "; 1 asked to drain" in " ".join(_printed(drained).split())


def test_every_screen_says_what_the_processes_say_that_they_do() -> None:
    """A sampler that holds nothing is alive, and only a process that says so waits."""
    waits = Doing(work=Work.WAITING, what="for a group that it may sample")
    listed = [sampler("a-1", doing=Doing(work=Work.SAMPLING)), sampler("b-2", doing=waits)]
    trains = Doing(work=Work.TRAINING, what="step 7")
    lease = TrainerLease(owner="t", lease_expires_at=NOW + timedelta(seconds=30), doing=trains)
    liveness = {"claims": {"a-1": 2, "a-1-scoring": 1, "other": 1}, "listed": listed}
    run = snapshot(lease=lease, liveness=liveness)
    shown = " ".join(_printed(run).split())
    assert "trainer t, training step 7" in shown
    assert f"a-1 (3, sampling), b-2 (0, {waits.shown}), other (1, holding claims)" in shown
    value = status_json(run, output_free=None)
    assert value["trainer"]["doing"] == "training step 7"
    assert value["sampler_work"]["b-2"] == waits.shown
    assert run.liveness.describe().startswith("samplers: 3, with 4 claims, 1 sampling, 1 waiting for a group")
    idle = snapshot(lease=lease, liveness={"claims": {}, "listed": listed[1:]})
    assert state_of(idle)[0] == "training"
    assert not [finding for finding in findings(idle) if "sampler" in finding.what]
    nobody = snapshot(lease=lease, liveness={"claims": {}, "listed": [sampler("b-2", 60.0, doing=waits)]})
    assert state_of(nobody)[0] == "trainer only"
    assert "waiting" not in _printed(nobody)


def test_an_empty_run_has_a_screen() -> None:
    nobody = {"claims": {}, "listed": (), "engines": (), "outages": (), "last_claim": None}
    page = _printed(_status(steps=[], tasks={}, failures=[], lease=TrainerLease(), liveness=nobody))
    assert "demo  empty" in page
    assert "no optimizer step yet" in page


def test_a_healthy_run_and_a_finished_one_say_so() -> None:
    assert "healthy    nothing is down" in _printed(snapshot())
    quiet: dict[str, Any] = {"claims": {}, "listed": (), "outages": []}
    page = _printed(_status(lease=TrainerLease(ended=TrainerEnd.FINISHED), liveness=quiet))
    assert "demo  finished" in page
    assert "trainer    finished" in page
    assert "healthy" not in page


@pytest.mark.parametrize(
    ("trainer", "samplers", "engines", "ended", "activity"),
    [
        (True, True, True, None, "training"),
        (False, True, True, TrainerEnd.FINISHED, "sampling"),
        (False, False, True, TrainerEnd.FINISHED, "finished"),
        (False, False, True, TrainerEnd.STOPPED, "serving"),
        (False, False, False, TrainerEnd.STOPPED, "idle"),
        (False, False, False, None, "idle"),
    ],
)
def test_activities(
    trainer: bool, samplers: bool, engines: bool, ended: TrainerEnd | None, activity: str
) -> None:
    assert activity_of(trainer=trainer, samplers=samplers, engines=engines, ended=ended) == activity


def test_the_json_has_every_key_and_no_number_that_json_lacks() -> None:
    value = json.loads(json.dumps(status_json(_status(), output_free=5), allow_nan=False))
    keys = (
        "run_name at activity steps rates queues sources trainer ended samplers sampler_states sampler_work"
        " last_claim engines outages failures parent children versions disk output_free state findings"
        " continued costs"
    )
    assert set(value) == set(keys.split())
    assert value["steps"][0]["metrics"] == {"tokens_per_second": 1234.5, "kl_k3": None}
    assert value["at"] == NOW.isoformat()
    assert (value["activity"], value["state"]) == ("training", "training")
    assert value["trainer"] == {"owner": "host-7", "host": "host", "pid": 7, "alive": True, "doing": None}
    assert value["queues"] == {
        "tasks_created": 4, "tasks_running": 3, "tasks_waiting": 1, "tasks_completed": 9,
        "waiting_for_score": 2, "data_ready": 16, "data_planned": 8, "data_trained": 192,
    }  # fmt: skip
    engine_keys = "url engine status alive policy_version running_requests heartbeat detail"
    assert set(engine_keys.split()) <= set(value["engines"][0])
    assert value["engines"][0]["alive"] is False
    assert value["findings"][0]["severity"] == "bad"


def test_a_sparkline_leaves_gaps() -> None:
    assert sparkline([0.0, None, 1.0, float("nan"), 0.5]) == "▁ █ ▄"
    assert sparkline([1.0]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"


def test_amounts_have_units() -> None:
    assert [amount(size) for size in (0, 1023, 1536, 5 * 2**40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_an_interval_that_is_too_short_is_refused(seconds: str) -> None:
    with pytest.raises(ConfigError, match="--interval_seconds"):
        command.StatusFlags(interval_seconds=float(seconds))


async def test_the_last_screen_stays_while_the_server_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(
        "agentrl.observe.terminal.stdout_console",
        lambda: Console(file=out, force_terminal=True, width=80, height=20),
    )
    answers = [Text("first screen"), StoreUnavailableError("MongoDB does not answer"), Text("second screen")]
    read_all = asyncio.Event()

    async def read() -> command._Reading:
        if not answers:
            read_all.set()
            await asyncio.Event().wait()
        answer = answers.pop(0)
        if isinstance(answer, StoreUnavailableError):
            raise answer
        return command._Reading(None, answer)

    watching = asyncio.create_task(command._watch(read, 0.0))
    await asyncio.wait_for(read_all.wait(), 10)
    await cancel(watching)
    shown = out.getvalue()
    assert "not up to date: MongoDB does not answer" in shown
    assert shown.rindex("second screen") > shown.index("not up to date")


FILES = (FileChecksum(name="delta.safetensors", bytes=3 << 20, sha256="0"),)
VERSIONS = [
    PolicyVersion(id=number, step=step, location="/w", files=FILES, encoding=encoding, train_step=None,
                  published_at=NOW, status=status)
    for number, step, encoding, status in (
        (2, 9, "delta", VersionStatus.PUBLISHED), (1, 8, "full", VersionStatus.WITHDRAWN),
        (0, 0, "full", VersionStatus.PUBLISHED),
    )
]  # fmt: skip


def test_a_version_has_its_bytes_and_the_seconds_until_the_last_engine_served_it() -> None:
    engines = [
        replace(engine(), served=tuple(ServedVersion(version=2, at=NOW + timedelta(seconds=s)) for s in at))
        for at in ((1.5,), (), (-3.0,), (0.5,))
    ]
    steps = [step_row(9), step_row(10, metrics={"seconds_publish": 0.25})]
    newest, base = published_versions(VERSIONS, steps, engines)
    assert (newest.version, newest.step, newest.encoding, newest.bytes) == (2, 9, "delta", 3 << 20)
    assert (newest.seconds_waited, newest.engines, newest.seconds_until_served) == (0.25, 3, 1.5)
    assert (base.version, base.seconds_waited, base.engines, base.seconds_until_served) == (0, None, 0, None)
    live = LiveWeights(kind="tensor", shares=())
    [row] = published_versions([replace(VERSIONS[0], files=(), live=live, encoding="full")], steps, [])
    assert (row.encoding, row.bytes) == ("tensor", 0)
    page = printed(render_run_status(snapshot(versions=[newest, base])))
    assert "weights    version 2 delta, 3.0 MiB, trainer waited 0.2 s, served by 3 after 1.5 s" in page


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["recrod"], "'recrod'"),
        (["record"], "id of a Record"),
        (["records", "--status", "lost"], "lost"),
        (["records", "--limit", "0"], "--limit"),
        (["curve", "--ouT", "x"], "--out"),
    ],
)
def test_wrong_words_are_config_errors(argv: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        audit(argv)
    assert part in str(caught.value)


def test_help_lists_the_views(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {view}" in out for view in ("run", "record ID", "records", "curve"))


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
    assert rows(page, "host-1") == [["host-1", "3", "holding", "claims"]]
    assert rows(page, "http://127.0.0.1:4000")[0][1:5] == ["local", "ready", "7", "3"]
    assert rows(page, "http://127.0.0.1:4001")[0][1:4] == ["sglang", "dead", "–"]
    assert "4002" not in page
    assert rows(page, "7 ")[-2] == ["7", "7", "published", "3", "min", "ago", "/out/weights/v000007"]
    assert rows(page, "6 ")[0][1:4] == ["committed", "5", "0.600"]
    assert rows(page, "7 ")[-1][1:4] == ["planned", "6", "–"]


def test_tables_without_rows_are_left_out() -> None:
    nothing: dict[str, Any] = {"tasks": {}, "records": {}, "engines": (), "steps": ()}
    details = RunDetails(groups=(), data=(), lengths=(), prompts=(), environments=(), versions=(), steps=())
    run = snapshot(**nothing, lease=TrainerLease(), liveness={"claims": {}, "listed": (), "engines": ()})
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
        "run_name tasks records failures continued groups data lengths prompts samplers sampler_states"
        " sampler_work outages past_outages waiting_for_score engines versions steps settings configurations"
        " environments evaluations at state findings parent children costs"
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
