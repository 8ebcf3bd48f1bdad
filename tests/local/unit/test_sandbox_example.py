"""The sandbox example: its flags, its tasks and the conversations that warm its model up."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.config.load import parse
from agentrl.config.schema import TaskConfig, ToolConfig
from agentrl.documents.task_file import read_tasks
from agentrl.local.launch import default_servers
from agentrl.tools.pool import load_tools

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "assets" / "examples" / "sandbox"


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the example's script as a module."""
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("sandbox_prepare", EXAMPLE / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_tasks_are_loaded_and_offer_the_tool_of_its_configuration(
    prepare: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f"{json.dumps(task)}\n" for task in prepare.tasks(20)))
    tasks = list(read_tasks(str(file), shuffle=False, skip_bad_lines=False).tasks)
    (tool,) = load_tools(str(EXAMPLE / "tools.yml"), call_timeout=1).tools
    assert len({task.query for task in tasks}) == 20
    assert {task.tools for task in tasks} == {(tool.name,)}


def test_its_flags_are_known_and_need_no_server_file(prepare: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in prepare.tasks(2)))
    flags = ["--config", str(EXAMPLE / "run.yml"), "--run_name", "x"]
    flags += ["--train_file", str(tmp_path / "tasks.jsonl")]
    configs = parse(flags, command="agentrl train", description="", shown=())
    assert configs[ToolConfig].tool_config_path == "assets/examples/sandbox/tools.yml"
    assert configs[TaskConfig].train_file == str(tmp_path / "tasks.jsonl")
    assert default_servers(configs, is_demo=False) is None


def test_its_warm_up_shows_programs_first_and_guesses_later(prepare: ModuleType) -> None:
    clean, mixed = (list(prepare.conversations(200, share)) for share in (0.0, 0.65))
    assert {len(item["messages"]) for item in clean} == {4}
    guesses = [item for item in mixed if len(item["messages"]) == 2]
    assert 100 < len(guesses) < 160
    code = clean[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"]
    assert code.startswith("print(")
    assert str(eval(code.removeprefix("print"))) == clean[0]["messages"][2]["content"]
