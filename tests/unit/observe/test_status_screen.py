"""The screens of ``agentrl status``: 80 columns, text of others without control characters, a lost server."""

from __future__ import annotations

import asyncio
import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from agentrl.cli import status as command
from agentrl.documents.outage import Outage
from agentrl.documents.status import ServiceStatus, StepStatus, TrainerEnd
from agentrl.errors import ConfigError, StoreUnavailableError
from agentrl.observe.json_output import to_json
from agentrl.observe.status.run import amount, render_run_status, sparkline
from agentrl.store.views.rows import FailureCount, StepRow
from agentrl.store.views.run_status import (
    Disk,
    EngineState,
    Queues,
    Rates,
    RunStatus,
    TrainerState,
    activity_of,
)

NOW = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)


def _status(**changes: Any) -> RunStatus:
    steps = [
        StepRow(
            id=f"1/{step}", step=step, status=StepStatus.COMMITTED, policy_version=step - 1, trajectories=8,
            groups=1, owner="trainer", planned_at=NOW - timedelta(minutes=10 - step),
            committed_at=NOW - timedelta(minutes=10 - step), reward=step / 10, pass_rate=0.5,
            staleness_mean=0.5, staleness_max=1.0,
            metrics={"tokens_per_second": 1234.5, "kl_k3": float("nan")},
        )
        for step in (1, 2, 3)
    ]  # fmt: skip
    fields: dict[str, Any] = {
        "run_name": "demo", "at": NOW, "activity": "training", "steps": steps,
        "rates": Rates(
            seconds=300.0, trajectories=40, scored=30, failed=2, generated_tokens=6000, mean_score=0.25
        ),
        "queues": Queues(
            tasks_created=4, tasks_running=3, tasks_waiting=1, tasks_completed=9, waiting_for_score=2,
            data_ready=16, data_planned=8, data_trained=192,
        ),
        "trainer": TrainerState(owner="host-7", host="host", pid=7, alive=True), "ended": None,
        "samplers": {"host-8": 12}, "last_claim": NOW,
        "engines": [
            EngineState(
                url="http://127.0.0.1:4001", engine="sglang", status=ServiceStatus.READY, alive=False,
                policy_version=3, running_requests=5, heartbeat=NOW - timedelta(minutes=2), detail=None,
            )
        ],
        "outages": [
            Outage(id="o", dependency="tool server search", by="host-8", why="refused \x1b[31m[red]",
                   began_at=NOW - timedelta(seconds=30))
        ],
        "failures": [FailureCount(kind="tool", count=2, message="\x1b]0;title\x07went\u202e away [b]x[/b]")],
        "disk": Disk(run=3 * 2**30, free=2**40, total=2**41),
    }  # fmt: skip
    return RunStatus(**(fields | changes))


def _printed(status: RunStatus, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(render_run_status(status))
    return out.getvalue()


def test_the_screen_fits_80_columns_and_says_what_is_wrong() -> None:
    page = _printed(_status())
    assert max(len(line) for line in page.splitlines()) <= 80
    flat = " ".join(page.split())
    parts = [
        "demo training", "step 3 7 min ago 60 steps/h", "reward 0.300 ▁▄█", "6.0 scored trajectories/min",
        "16 ready", "trainer host-7", "host-8 (12)", "dead", "tool server search since 30 s ago",
        "tool 2 went away [b]x[/b]", "database 3.0 GiB, 1.0 TiB free on the server",
    ]  # fmt: skip
    assert [part for part in parts if part not in flat] == []
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_an_empty_run_has_a_screen() -> None:
    rates = Rates(seconds=300.0, trajectories=0, scored=0, failed=0, generated_tokens=0, mean_score=None)
    page = _printed(
        _status(steps=[], trainer=None, samplers={}, engines=[], outages=[], failures=[], rates=rates,
                last_claim=None, activity="idle", disk=Disk())
    )  # fmt: skip
    assert "no optimizer step yet" in page


def test_a_finished_run_says_so() -> None:
    page = _printed(_status(trainer=None, activity="finished", ended=TrainerEnd.FINISHED))
    assert "demo  finished" in page
    assert "trainer    finished" in page


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


def test_json_has_no_number_that_json_lacks() -> None:
    value = to_json(_status())
    assert value["steps"][0]["metrics"] == {"tokens_per_second": 1234.5, "kl_k3": None}
    assert value["at"] == "2026-11-22T12:00:00+00:00"


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
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    shown = out.getvalue()
    assert "not up to date: MongoDB does not answer" in shown
    assert shown.rindex("second screen") > shown.index("not up to date")
