"""The audit pages, rendered from hand-made documents."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import audit_documents as documents
import pytest
from rich.console import Console, RenderableType

from agentrl.documents.evaluation import Evaluation
from agentrl.documents.gateway import ReportedReward
from agentrl.documents.outage import Outage
from agentrl.documents.record import Failure
from agentrl.documents.serving import PolicyVersion
from agentrl.documents.status import (
    CallStatus,
    EvaluationStatus,
    RecordStatus,
    ServiceStatus,
    StepStatus,
    StopReason,
)
from agentrl.errors import AgentRLError, ConfigError
from agentrl.observe.audit.curve import plot_curve, running_mean
from agentrl.observe.audit.record import render_rows, render_trajectory
from agentrl.observe.audit.run import render_state
from agentrl.observe.terminal import clean, excerpt
from agentrl.store.views.read import RunState, WholeTrajectory
from agentrl.store.views.rows import (
    DataCount,
    EngineRow,
    EnvironmentCount,
    FailureCount,
    GroupCount,
    LengthBias,
    PromptTokens,
)


def printed(page: RenderableType, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False, emoji=False).print(page)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_a_trajectory_reads_turn_by_turn() -> None:
    page = printed(
        render_trajectory(
            WholeTrajectory(record=documents.record(), calls=documents.two_turns(), trained_at_steps=(6,))
        )
    )
    expected = [
        "train/0/task_001/3/1  TRAINED  score 1.000",
        "2 turns · 1 tool calls · 0 context resets · 42 generated tokens · last prompt 140 tokens · policy"
        " version 4–5",
        "model calls 2.50 s · tools 0.02 s · scoring 0.75 s",
        "advantage +0.500 · trained at step 6",
        "turn 1 · version 4 · 100 prompt tokens (0 cached) + 20 generated in 1.25 s · stop",
        "system",
        "  You may calculate.",
        "user",
        "  What is 17 * 23?",
        "assistant",
        "  I use the tool.",
        '  → calculate(expression="17 * 23")',
        "  ← result from calc in 0.012 s",
        "    391",
        "turn 2 · version 4 [0, 5), 5 [5, 22)",
        "  <answer>391</answer>",
        "stopped    answered",
        "answer     391",
        'score      1.000  {"verdict": "equal"}',
    ]
    places = [page.find(line) for line in expected]
    assert -1 not in places, expected[places.index(-1)]
    assert places == sorted(places)
    assert page.count("calculate(") == 1
    assert "tool\n" not in page.split("turn 2")[1]


def test_a_failed_attempt_says_why() -> None:
    failed = documents.record(
        status=RecordStatus.FAILED, score=None, advantage=None, final_answer=None,
        stop_reason=StopReason.FAILED,
        failure=Failure(kind="tool", message="the server went away"), completed_at=None, score_details={},
    )  # fmt: skip
    page = printed(render_trajectory(WholeTrajectory(record=failed, failures=[failed])))
    assert "attempt 1 " in page
    assert "FAILED  score –" in page
    assert "not trained" in page
    assert "failed     tool: the server went away" in page
    assert "answer     –" in page


def test_malformed_calls_and_context_resets_are_shown() -> None:
    broken = documents.call(
        1, parent=None, status=CallStatus.FORMAT_ERROR, error="arguments are no JSON",
        response={"content": None, "tool_calls": [{"name": "calculate", "arguments": "{17"}]},
        messages=({"role": "user", "content": [{"type": "text", "text": "part one"}]},),
    )  # fmt: skip
    page = printed(
        render_trajectory(WholeTrajectory(record=documents.record(), calls=[documents.call(0), broken]))
    )
    assert "the context was reset" in page
    assert "formaterror" in page
    assert "→ calculate({17)" in page
    assert "arguments are no JSON" in page
    assert "  part one" in page


def test_what_a_model_writes_cannot_touch_the_terminal() -> None:
    evil = "[red]markup[/] \x1b[2J\x1b]0;title\x07 \x1b]8;;http://x\x1b\\link \x9b31m \u202e :smile: \x00"
    message = {"role": evil, "content": evil}
    turn = documents.call(0, response={"content": evil}, messages=(message,), error=evil)
    page = printed(
        render_trajectory(
            WholeTrajectory(record=documents.record(query=evil, final_answer=evil, owner=evil), calls=[turn])
        )
    )
    assert not [letter for letter in page if ord(letter) < 32 and letter != "\n"]
    assert not {"\x7f", "\x9b", "\u202e"} & set(page)
    assert "[red]markup[/]" in page
    assert ":smile:" in page
    assert "title" not in page


def test_a_trajectory_of_a_client_shows_branches_roles_and_rewards() -> None:
    main, side = documents.call(0), documents.call(1, parent=None, opens_branch=True, role="critic")
    again = documents.call(2, parent=main.id, messages=({"role": "user", "content": "and now"},))
    record = documents.record(
        train_rule="main", untrained_calls=(1,), trace_id="ab" * 16,
        reported_reward=ReportedReward(score=0.75, details={"by": "me"}, turn_rewards={"2": 0.5, "0": -1}),
    )  # fmt: skip
    page = printed(render_trajectory(WholeTrajectory(record=record, calls=[main, side, again])))
    for line in (
        f"trace {'ab' * 16}",
        "train rule main: it chooses 2 of 3 model calls",
        "stop · role critic · not trained",
        "a new branch: this is the whole prompt",
        "stop · continues turn 1",
        'reported   score 0.750 by the agent, turn 1 -1, turn 3 +0.5  {"by": "me"}',
    ):
        assert line in page, line
    assert rows(page, "1 ") == [["1", "2", "role", "critic", "no"]]
    assert rows(page, "2 ")[-1] == ["2", "1", "3", "main", "yes", "and", "now"]
    assert "context was reset" not in page


def test_environments_and_evaluations_are_tables() -> None:
    done = Evaluation(
        id="eval-1", status=EvaluationStatus.FINISHED, version=7, step=70, model=None, file="held_out.jsonl",
        tasks_digest="t", settings_digest="s", samples=4, right_threshold=0.5, finished_at=documents.NOW,
        results={"total": {
            "scored": 40, "failed": 1, "score": {"value": 0.5, "low": 0.4, "high": 0.6},
            "pass_at": {"1": {"value": 0.25, "low": None, "high": None}},
        }},
    )  # fmt: skip
    silent = replace(
        done, id="eval-2", status=EvaluationStatus.RUNNING, version=None, model="/models/base", results=None,
        step=None, finished_at=None, seen_at=documents.NOW - timedelta(hours=1),
    )  # fmt: skip
    environment = EnvironmentCount(
        split="train", environment="reasoning_gym", tasks=50, finalized=20, trajectories=160, score=0.31,
        pass_rate=0.25,
    )  # fmt: skip
    page = printed(
        render_state(state(environments=[environment], evaluations=[silent, done]), alive_seconds=10.0), 220
    )
    assert ["train", "reasoning_gym", "50", "20", "160", "0.310", "0.25"] in rows(page, "train ")
    assert rows(page, "eval-1")[0][:9] == [
        "eval-1", "version", "7", "70", "finished", "held_out.jsonl", "4", "40", "1",
    ]  # fmt: skip
    assert "0.500 [0.400, 0.600]" in page
    assert rows(page, "eval-2")[0][:4] == ["eval-2", "/models/base", "–", "lost:"]


def test_clean_keeps_text_and_drops_sequences() -> None:
    assert clean("a\tb\r\nc\x1b[1;31md\x1b[0m é 漢\x7f") == "a\tb\ncd é 漢"
    assert clean("line\x1b]0;no end\nnext") == "linenext"
    assert excerpt("a\n b   c", 10) == "a b c"
    assert excerpt("x" * 20, 5) == "xxxx…"


def state(**changes: Any) -> RunState:
    now = documents.NOW
    engine = EngineRow(
        id="e1", url="http://127.0.0.1:4000", engine="local", model="train-model", status=ServiceStatus.READY,
        policy_version=7, running_requests=3, host="h", pid=1, started_at=now,
        heartbeat=now - timedelta(seconds=1),
    )  # fmt: skip
    dead = EngineRow(
        id="e2", url="http://127.0.0.1:4001", engine="sglang", model="train-model", host="h", pid=2,
        status=ServiceStatus.READY, started_at=now, heartbeat=now - timedelta(minutes=9),
    )  # fmt: skip
    stopped = EngineRow(
        id="e3", url="http://127.0.0.1:4002", engine="local", model="m", host="h", pid=3,
        status=ServiceStatus.STOPPED, started_at=now, heartbeat=now,
    )  # fmt: skip
    version = PolicyVersion(
        id=7, step=7, location="/out/weights/v000007", files=(), train_step="a/7",
        published_at=now - timedelta(minutes=3),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "run_name": "demo", "tasks": {"train, epoch 0": {"completed": 12, "running": 4}},
        "records": {"train": {"ready": 40, "failed": 3}},
        "failures": [FailureCount(kind="engine", count=3, message="engine [x] \x1b[31mgone\nsecond line")],
        "data": [DataCount(status="trained", count=30, tokens=12345, trainable_tokens=2345)],
        "lengths": [
            LengthBias(split="train", sampled=40, sampled_tokens=50.0, trained=30, trained_tokens=45.0)
        ],
        "prompts": [PromptTokens(split="eval", tokens=20_000, cached=17_800)],
        "groups": [
            GroupCount(by="order", groups=9, abandoned_groups=6, trajectories=40, trained=10, pass_rate=0.9),
            GroupCount(by="pass_rate", groups=4, abandoned_groups=0, trajectories=0, trained=0, pass_rate=0),
        ],
        "outages": [
            Outage(id="o/1", dependency="judge gpt", by="host-1", why="429", held=2,
                   began_at=now - timedelta(seconds=41))
        ],
        "waiting_for_score": 17, "samplers": {"host-1": 3},
        "engines": [engine, dead, stopped], "versions": [version],
        "steps": [
            documents.step_row(6),
            documents.step_row(7, status=StepStatus.PLANNED, committed_at=None, metrics={}),
        ],
        "at": now, "settings": [],
        "configurations": [],
    }  # fmt: skip
    return RunState(**(fields | changes))


def rows(page: str, first: str) -> list[list[str]]:
    return [line.split() for line in page.splitlines() if line.strip().startswith(first)]


def test_the_state_of_a_run_is_tables() -> None:
    page = printed(render_state(state(), alive_seconds=10.0))
    assert "run demo, 2026-11-21 12:00:00 UTC" in page
    assert rows(page, "judge gpt") == [["judge", "gpt", "41", "s", "ago", "2", "429", "host-1"]]
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
    assert rows(page, "7 ")[0] == ["7", "7", "published", "3", "min", "ago", "/out/weights/v000007"]
    assert rows(page, "6 ")[0][1:4] == ["committed", "5", "0.600"]
    assert rows(page, "7 ")[1][1:4] == ["planned", "6", "–"]


def test_tables_without_rows_are_left_out() -> None:
    nothing: dict[str, Any] = {
        "tasks": {}, "records": {}, "failures": [], "data": [], "lengths": [], "prompts": [], "engines": [],
        "versions": [], "steps": [], "samplers": {}, "groups": [], "outages": [], "waiting_for_score": 0,
    }  # fmt: skip
    assert state(**nothing).empty
    assert not state().empty
    page = printed(render_state(state(**nothing), alive_seconds=10.0))
    assert page == "run demo, 2026-11-21 12:00:00 UTC"


def test_records_are_listed_with_their_reasons() -> None:
    failed = documents.row(
        id="train/0/a/0/1", status=RecordStatus.FAILED, failure=Failure(kind="engine", message="gone"),
        score=None, advantage=None, final_answer=None, min_version=None, max_version=None,
    )  # fmt: skip
    unused = documents.row(id="train/0/b/0/1", status=RecordStatus.ABANDONED, abandoned_because="zero_spread")
    page = printed(render_rows([documents.row(), failed, unused]))
    assert rows(page, "train/0/task_001")[0][1:6] == ["trained", "answered", "391", "1.000", "+0.500"]
    assert rows(page, "train/0/a")[0][1:5] == ["failed", "engine:", "gone", "–"]
    assert rows(page, "train/0/b")[0][1:3] == ["abandoned", "zero_spread"]


def test_the_curve_is_a_picture_of_the_committed_steps(tmp_path: Path) -> None:
    steps = [documents.step_row(number) for number in (3, 1, 2)]
    steps.append(documents.step_row(4, status=StepStatus.REVERTED))
    out = tmp_path / "plots" / "curve.png"
    plot_curve("demo", steps, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    vector = tmp_path / "curve.svg"
    plot_curve("demo", steps[:1], vector)
    assert "<svg" in vector.read_text(encoding="utf-8")
    plot_curve("demo", steps[:2], vector)
    assert "mean of 2 steps" in vector.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "steps", [[], [documents.step_row(1, status=StepStatus.PLANNED)], [documents.step_row(1, metrics={})]]
)
def test_a_run_without_steps_has_no_curve(steps: list[Any], tmp_path: Path) -> None:
    with pytest.raises(AgentRLError, match="no committed optimizer step"):
        plot_curve("demo", steps, tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["curve.notaformat", "file/curve.png"])
def test_a_plot_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        plot_curve("demo", [documents.step_row(1)], tmp_path / name)


def test_running_mean_is_over_what_came_before() -> None:
    assert running_mean([1.0, 2.0, 6.0, 1.0], 3) == [1.0, 1.5, 3.0, 3.0]
