"""The ten questions of docs/auditing.md, asked in mongosh; what views cost, asked of the server."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from questions_run import FAST, SLOW, build

from agentrl.config.schema import RunConfig
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[4]
QUESTIONS = ROOT / "assets" / "compass"
MONGOSH = "mongosh@2.12.0"
_INSTALL_SECONDS = 240


@pytest.fixture(scope="session")
def mongosh() -> Path:
    """The shell from npm, installed once into ``.agentrl``."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("mongosh comes from npm, and there is no npm here")
    folder = ROOT / ".agentrl" / MONGOSH
    folder.mkdir(parents=True, exist_ok=True)
    shell = folder / "node_modules" / ".bin" / "mongosh"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            _install(npm, folder)
    return shell


def _install(npm: str, folder: Path) -> None:
    (folder / "package.json").write_text('{"private": true}', encoding="utf-8")
    command = [
        npm, "install", MONGOSH, "--save-exact", "--ignore-scripts", "--no-audit", "--no-fund",
        "--fetch-retries=1",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install {MONGOSH} within {_INSTALL_SECONDS} s")
    if done.returncode:
        pytest.skip(f"npm cannot install {MONGOSH}: {done.stderr.strip()[:300]}")
    (folder / "installed").touch()


@pytest.fixture
async def ask(
    mongosh: Path, store: Store, run_config: RunConfig, tmp_path: Path
) -> Callable[[], dict[str, Any]]:
    """Ask all playground files of assets/compass in one mongosh; return the answers by number."""
    await build(store, tmp_path / "weights")
    server, _, options = str(run_config.db_connection_string).partition("/?")
    settings = tmp_path / ".mongodb" / "mongosh" / "config"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"enableTelemetry": false}', encoding="utf-8")

    def run() -> dict[str, Any]:
        asked = {
            path.name[:2]: path.read_text(encoding="utf-8").rstrip().removesuffix(";")
            for path in sorted(QUESTIONS.glob("*.mongodb.js"))
        }
        script = ",\n".join(f'"{number}": (\n{question}\n)' for number, question in asked.items())
        done = subprocess.run(
            [str(mongosh), "--quiet", "--json=relaxed", f"{server}/{run_config.run_name}?{options}",
             "--eval", f"({{{script}}})"],
            env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        answers: dict[str, Any] = json.loads(done.stdout)
        return answers

    return run


def ids(answer: list[dict[str, Any]]) -> list[str]:
    return [row["_id"] for row in answer]


async def test_mongosh_answers_the_ten_questions(ask: Callable[[], dict[str, Any]]) -> None:
    answers = await asyncio.to_thread(ask)
    assert len(answers) == 10
    _check_a_step(answers)
    _check_failures_tools_and_engines(answers)
    _check_groups_and_tasks(answers)
    _check_turns(answers)


def _check_a_step(answers: dict[str, Any]) -> None:
    assert [(row["trajectory"], row["score"], row["staleness"]) for row in answers["01"]] == [
        ("train/1/task_002/0/1", 1.0, 1), ("train/1/task_002/1/1", 0.0, 0),
    ]  # fmt: skip
    assert [(row["_id"], row["trajectories"], row["mean_score"]) for row in answers["07"]] == [
        (0, 1, 0.0),
        (1, 1, 1.0),
    ]
    assert ids(answers["08"]) == ["train/1/task_004/0/1", "train/1/task_004/1/1"]
    assert all(row["staleness_now"] == 1 and row["seconds_waiting"] >= 0 for row in answers["08"])


def _check_failures_tools_and_engines(answers: dict[str, Any]) -> None:
    assert [(row["_id"], row["newest_message"]) for row in answers["02"]] == [
        ({"kind": "engine", "then": "given up: no attempts left"}, "the engine went away"),
        ({"kind": "tool", "then": "another attempt was scored"}, "search: connection refused"),
    ]
    tools = [(row["tool"], row["calls"], row["errors"], row["p95_seconds"]) for row in answers["03"]]
    assert tools == [("search", 2, 2, 4.0), ("calculate", 3, 0, 0.1)]
    engines = [(row["url"], row["versions_behind"], row["tokens_per_second"]) for row in answers["10"]]
    assert engines == [(SLOW, 1, 2.0), (FAST, 0, 8.0)]


def _check_groups_and_tasks(answers: dict[str, Any]) -> None:
    assert [(row["_id"], row["agreement"]) for row in answers["04"]] == [
        ("train/0/task_002", "all right"), ("train/1/task_001", "all right"),
        ("train/0/task_003", "all wrong"), ("train/1/task_003", "all wrong"),
    ]  # fmt: skip
    assert [(row["_id"], row["mean_scores"], row["always_wrong"]) for row in answers["09"]] == [
        ("train/task_001", [0.5, 1.0], False), ("train/task_003", [0.0, 0.0], True),
    ]  # fmt: skip


def _check_turns(answers: dict[str, Any]) -> None:
    """One trajectory turn by turn, and one of two versions."""
    turns = answers["05"]
    assert [(row["index"], row["messages"][0]["role"], row["response"]["content"]) for row in turns] == [
        (0, "user", "Let me see."), (1, "tool", "<answer>4</answer>"),
    ]  # fmt: skip
    assert [(tool["name"], tool["result"]) for tool in turns[0]["tool_executions"]] == [("calculate", "4")]
    assert [message["content"] for message in turns[1]["messages"]] == ["4"]
    assert [(row["_id"], row["min_version"], row["max_version"]) for row in answers["06"]] == [
        ("train/1/task_002/0/1", 0, 1)
    ]


async def test_a_conversation_is_whole_and_counts_its_contexts(store: Store, tmp_path: Path) -> None:
    await build(store, tmp_path / "weights")
    record = "train/0/task_001/0/1"
    await store.database["DispatchedSamplingTask"].update_one(
        {"_id": f"{record}/1"}, {"$set": {"parent": None}}
    )
    document = await store.database["audit_conversations"].find_one({"_id": record})
    said = [
        (line["context"], line["turn"], line["role"], line["content"]) for line in document["conversation"]
    ]
    assert said == [
        (1, 0, "user", "What is 2 + 2?"), (1, 0, "assistant", "Let me see."),
        (2, 1, "tool", "4"), (2, 1, "assistant", "<answer>4</answer>"),
    ]  # fmt: skip
    calls = await store.database["audit_tool_calls"].find({"trajectory": record}).to_list()
    assert [(call["tool"], call["arguments"], call["turn"]) for call in calls] == [
        ("calculate", {"expression": "2 + 2"}, 0)
    ]


FILTERS: list[tuple[str, dict[str, Any], str]] = [
    ("audit_trajectories", {"_id": "r7"}, "_id_"),
    ("audit_trajectories", {"task": "t7"}, "task_1_traj_id_1_attempt_1"),
    ("audit_trajectories", {"status": "failed"}, "status_1_created_at_-1__id_-1"),
    ("audit_trajectories", {}, "created_at_-1__id_-1"),
    ("audit_turns", {"record": "x"}, "record_1_index_1"),
    ("audit_conversations", {"_id": "x"}, "_id_"),
    ("audit_failures", {}, "status_1_created_at_-1__id_-1"),
    ("audit_tool_calls", {"trajectory": "r7"}, "_id_"),
    ("audit_tool_calls", {}, "created_at_-1__id_-1"),
    ("audit_groups", {"_id": "x"}, "_id_"),
    ("audit_groups", {"split": "train", "status": "completed"}, "split_1_status_1_epoch_1_order_1"),
    ("audit_steps", {"status": "committed", "step": 1}, "step_1"),
    ("audit_training", {"status": "committed", "step": 1}, "step_1"),
    ("audit_waiting", {"split": "train"}, "split_1_status_1_created_at_1__id_1_min_version_1"),
]


async def test_a_filter_on_a_view_reaches_an_index_before_anything_is_looked_up(store: Store) -> None:
    await store.database["Record"].insert_many(
        [{"_id": f"r{number}", "task": f"t{number}", "status": "ready"} for number in range(300)],
        bypass_document_validation=True,
    )
    for view, filters, index in FILTERS:
        explain = {"aggregate": view, "pipeline": [{"$match": filters}], "cursor": {}}
        plan = await store.database.command("explain", explain, verbosity="queryPlanner")
        first = plan["stages"][0]["$cursor"] if "stages" in plan else plan
        assert index in _indexes(first["queryPlanner"]["winningPlan"]), (view, filters)


def _indexes(plan: Any) -> set[str]:
    """The indexes that a plan reads; ``_id_`` also where one document is fetched by it."""
    if isinstance(plan, list):
        return set().union(*map(_indexes, plan))
    if not isinstance(plan, dict):
        return set()
    found = set().union(*map(_indexes, plan.values()))
    if plan.get("stage") == "IDHACK":
        found.add("_id_")
    elif plan.get("stage") == "IXSCAN":
        found.add(plan["indexName"])
    return found
