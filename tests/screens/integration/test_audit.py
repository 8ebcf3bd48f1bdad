"""``agentrl audit`` on a real database."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cli import main as cli
from agentrl.config.schema import RunConfig
from agentrl.documents.document import Root, now
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    ToolExecution,
    VersionSpan,
    pack_floats,
    pack_ids,
)
from agentrl.documents.record import Failure, Record
from agentrl.documents.run import InferenceService, PolicyVersion
from agentrl.documents.status import (
    CallStatus,
    DataStatus,
    RecordStatus,
    ServiceStatus,
    StepStatus,
    StopReason,
    TaskStatus,
)
from agentrl.documents.task import Task, record_key, task_key
from agentrl.documents.training import DBRecordData, Node, TrainableSpan, TrainStep
from agentrl.errors import StoreError
from agentrl.local.mongod import EmbeddedMongo
from agentrl.screens.snapshot import SnapshotReader
from agentrl.store.client import open_existing, open_store

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]

TASK = task_key("train", 0, "sum")
RECORD = record_key(TASK, 0, 1)
FAILED = record_key(TASK, 1, 1)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """The flags that name a run with one task, two records, one step; the server stops afterwards."""
    server = EmbeddedMongo(tmp_path_factory.mktemp("audit-mongo"))
    try:
        uri = server.up().uri
        asyncio.run(_fill(RunConfig(run_name="audited", db_connection_string=uri)))
        yield ("--run_name", "audited", "--db_connection_string", uri)
    finally:
        server.down()


async def _fill(run: RunConfig) -> None:
    async with await open_store(run) as store:
        for document in _documents():
            await store.database[type(document).__name__].insert_one(document.to_document())


def _documents() -> list[Root]:
    """One document of every collection, and a failed attempt beside the trained one."""
    record = Record(
        id=RECORD, task=TASK, traj_id=0, attempt=1, split="train", epoch=0, status=RecordStatus.READY,
        query="2 + 3?", answer="5", final_answer="5", score=1.0, advantage=0.5, turns=1, tool_calls=1,
        generated_tokens=3, input_tokens=400, cached_tokens=300, stop_reason=StopReason.ANSWERED,
        min_version=1, max_version=1,
        traj=(f"{RECORD}/0",), trained_count=1, last_trained_step=2, completed_at=now(), scored_at=now(),
    )  # fmt: skip
    failed = replace(
        record, id=FAILED, traj_id=1, status=RecordStatus.FAILED, score=None, advantage=None,
        final_answer=None,
        failure=Failure(kind="tool", message="server [calc] \x1b[31mwent away"), traj=(), trained_count=0,
        last_trained_step=None, stop_reason=StopReason.FAILED,
    )  # fmt: skip
    call = DispatchedSamplingTask(
        id=f"{RECORD}/0", record=RECORD, index=0, parent=None, status=CallStatus.COMPLETED,
        messages=({"role": "user", "content": "2 + 3?"},), response={"content": "I add. [b]5[/b]"},
        tool_executions=(
            ToolExecution(
                name="add", arguments={"a": 2, "b": 3}, result="5", error=False, seconds=0.01, server="calc"
            ),
        ),
        finish_reason="stop", versions=(VersionSpan(version=1, start=0, end=3),), prompt_tokens=4,
        generated_tokens=3, cached_tokens=2, engine="http://127.0.0.1:4001", generate_seconds=0.5,
        context_ids=pack_ids([1, 2, 3, 4]), output_ids=pack_ids([5, 6, 7]), logprobs=pack_floats([-1.0] * 3),
    )  # fmt: skip
    data = DBRecordData(
        id=RECORD, record=RECORD, task=TASK, split="train", status=DataStatus.TRAINED, score=1.0,
        advantage=0.5, min_version=1, max_version=1, tokens=7, trainable_tokens=3, turns=1,
        nodes=(Node(start=0, end=7),),
        spans=(TrainableSpan(start=4, end=7, call=0, version=1, advantage=0.5, temperature=1.0),),
        trained_count=1,
        trained_at_steps=(2,), input_ids=pack_ids(range(1, 8)), behavior_logprobs=pack_floats([-1.0] * 3),
    )  # fmt: skip
    step = TrainStep(
        id="a/2", step=2, status=StepStatus.COMMITTED, policy_version=1, data=(RECORD,), owner="trainer",
        metrics={"reward": 0.625, "staleness_mean": 0.0, "staleness_max": 0.0}, committed_at=now(),
    )  # fmt: skip
    task = Task(
        id=TASK, task_id="sum", split="train", epoch=0, order=0, query="2 + 3?", status=TaskStatus.COMPLETED
    )
    version = PolicyVersion(id=1, step=1, location="/weights/v000001", files=(), train_step="a/1")
    engine = InferenceService(
        id="e", url="http://127.0.0.1:4001", engine="local", model="train-model", status=ServiceStatus.READY,
        policy_version=1, running_requests=2, host="h", pid=1,
    )  # fmt: skip
    return [task, record, failed, call, data, step, version, engine]


Audit = Callable[..., str]


@pytest.fixture
def audit(database: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> Audit:
    """Run ``agentrl audit`` with words on the run; return its output, or its errors if ``code`` is not 0."""

    def run(*words: str, code: int = 0, flags: Sequence[str] = database) -> str:
        assert cli.main(["audit", *words, *flags]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return run


def test_run_prints_the_state(audit: Audit) -> None:
    page = audit("run", "--heartbeat_seconds", "600")
    rows = [line.split() for line in page.splitlines()]
    assert ["train,", "epoch", "0", "–", "–", "–", "1", "1"] in rows
    assert ["tool", "1", "server", "[calc]", "went", "away"] in rows
    assert ["trained", "1", "7", "3"] in rows
    assert ["train", "1", "3.0", "1", "3.0", "1.00"] in rows
    assert ["train", "800", "600", "0.75"] in rows
    assert any(row[:1] == ["http://127.0.0.1:4001"] and row[6] == "0.50" for row in rows)
    assert any(row[:5] == ["http://127.0.0.1:4001", "local", "ready", "1", "2"] for row in rows)
    assert any(row[:4] == ["2", "committed", "1", "0.625"] for row in rows)
    assert "\x1b" not in page


@pytest.mark.parametrize("wanted", [RECORD, "sum/0/1"])
def test_record_prints_one_trajectory(wanted: str, audit: Audit) -> None:
    page = audit("record", wanted)
    parts = [f"{RECORD}  TRAINED  score 1.000", "trained at step 2", "turn 1 · version 1", "I add. [b]5[/b]",
             "→ add(a=2, b=3)", "← result from calc", "answer     5"]  # fmt: skip
    assert [part for part in parts if part not in page] == []


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--status", "failed"], [FAILED]),
        (["--status", "scoring"], []),
        (["--step", "2"], [RECORD]),
        (["--step", "1"], []),
        (["--failure", "tool"], [FAILED]),
        (["--tool", "add"], [RECORD]),
        (["--text", "i ADD. [b]"], [RECORD]),
        (["--task", "sum", "--order", "oldest"], [RECORD, FAILED]),
        (["--split", "eval"], []),
        (["--version", "1", "--min_score", "0.5"], [RECORD]),
        (["--max_score", "0.5"], []),
    ],
)
def test_records_are_selected(flags: list[str], found: list[str], audit: Audit) -> None:
    if not found:
        assert f"no Record with {flags[0]} {flags[1]}" in audit("records", *flags, code=1)
        return
    assert sorted(row["id"] for row in json.loads(audit("records", "--json", *flags))) == sorted(found)
    page = audit("records", *flags)
    assert {key for key in (RECORD, FAILED) if key in page} == set(found)


def test_pages_are_printed_as_json(audit: Audit) -> None:
    assert json.loads(audit("run", "--json"))["run_name"] == "audited"
    page = json.loads(audit("record", RECORD, "--json"))
    assert page["calls"][0]["response"]["content"] == "I add. [b]5[/b]"
    assert "output_ids" not in page["calls"][0]
    assert json.loads(audit("curve", "reward", "--json"))["metrics"] == {"reward": [0.625]}


@pytest.mark.parametrize("metrics", [(), ("reward", "staleness_max")])
def test_curve_plots_any_metrics(metrics: tuple[str, ...], tmp_path: Path, audit: Audit) -> None:
    out = tmp_path / "curve.png"
    assert audit("curve", *metrics, "--out", str(out)).strip() == str(out)
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("curve", "rewrad"), "did you mean reward?"),
        (("record", "train/0/sum"), "fits several"),
        (("record", "nothing"), "no Record"),
    ],
)
def test_a_name_that_the_run_does_not_have_is_an_error(
    words: tuple[str, ...], reason: str, audit: Audit
) -> None:
    assert reason in audit(*words, code=2)


@pytest.mark.parametrize("view", ["run", "records", "curve"])
def test_a_run_that_does_not_exist_is_an_error_and_stays_so(
    view: str, database: tuple[str, ...], audit: Audit
) -> None:
    error = audit(view, code=1, flags=[*database[2:], "--run_name", "auditd"])
    assert "there is no run 'auditd'" in error
    assert "did you mean audited? runs: audited" in error


def test_an_empty_run_is_an_error(database: tuple[str, ...], audit: Audit) -> None:
    asyncio.run(_make_empty(RunConfig(run_name="nothing", db_connection_string=database[3])))
    flags = [*database[2:], "--run_name", "nothing"]
    assert "'nothing' is empty" in audit("run", code=1, flags=flags)
    assert "no committed optimizer step" in audit("curve", code=1, flags=flags)


async def _make_empty(run: RunConfig) -> None:
    async with await open_store(run):
        pass


async def test_a_server_that_ends_meanwhile_is_an_error(tmp_path: Path) -> None:
    server = EmbeddedMongo(tmp_path / "mongo")
    run = RunConfig(run_name="r", db_connection_string=server.up().uri, db_timeout_seconds=1.0)
    try:
        await _make_empty(run)
        async with await open_existing(run) as store:
            server.down()
            with pytest.raises(StoreError, match=r"settings: flags: MongoDB at .* did not answer"):
                await SnapshotReader(store).read()
    finally:
        server.down()


def test_a_database_that_is_gone_is_an_error() -> None:
    flags = ["--db_connection_string", "mongodb://user:hidden@127.0.0.1:1/", "--db_timeout_seconds", "0.5"]
    command = [sys.executable, "-m", "agentrl", "audit", "run", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "did not answer" in done.stderr
    assert "hidden" not in done.stderr
    assert "Traceback" not in done.stderr
