"""What docs/mcp_server.md writes works together: server, tasks, scorer, and the trajectory of a sampler."""

from __future__ import annotations

import asyncio
import json
import runpy
from pathlib import Path

import pytest
from docs_pages import DOCS, write_files
from test_sampling import Setting, quick

from agentrl.base.user_code import allow
from agentrl.cli.main import main
from agentrl.config.schema import TaskConfig, ToolConfig
from agentrl.rollout.load_tasks import read_source
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool

pytestmark = pytest.mark.integration
__all__ = ["quick"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page, in a folder where its commands run."""
    write_files(DOCS / "mcp_server.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    runpy.run_path("stock_tasks.py")
    return tmp_path


def test_its_tasks_load_and_none_of_them_is_held_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", "check", "tasks.jsonl", "--eval_file", "eval.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tasks"], found["eval"]["tasks"], found["leakage"]["tasks"]) == (24, 12, 0)
    assert (found["leakage"]["near"]["tasks"], found["leaks"]["tasks"]) == (0, 0)


def clumsy(prompt: str) -> str:
    """Ask for the bolts rightly, for the nuts by another name, and for the rest not at all."""
    asked, _, answered = prompt.rpartition("user\n")[2].partition("tool\n")
    for item, called in (("bolts", "bolts"), ("nuts", "knots")):
        if item in asked and not answered:
            arguments = json.dumps({"name": "pieces", "arguments": {"item": called}})
            return f"<tool_call>{arguments}</tool_call>"
    return "<answer>31</answer>" if "31" in answered else "<answer>0</answer>"


async def test_a_sampler_calls_its_server_and_scores_with_its_scorer(folder: Path, store: Store) -> None:
    flags = TaskConfig(num_generations=1, shuffle_tasks=False)
    read = await read_source("tasks.jsonl", flags, split="train")
    allow(read.outside)
    await store.tasks.load(read.tasks[:3])
    async with ToolPool(ToolConfig(mcp_servers_file="servers.yml")) as tools:
        setting = Setting(store, clumsy, tools=tools)
        await asyncio.wait_for(setting.run(), 60)
    scores, results = {}, {}
    for task in read.tasks[:3]:
        (record,) = await setting.records(task.id)
        scores[task.answer] = record.score
        calls = await store.model_calls.by_record(record.id)
        results[task.answer] = [run.text for call in calls for run in call.tool_executions]
    assert scores == {"31": 1.0, "84": 0.3, "57": 0.0}
    assert results["31"] == ["31"]
    assert "there is no item 'knots'" in results["84"][0]
