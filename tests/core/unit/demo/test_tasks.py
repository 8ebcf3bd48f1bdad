"""The quickstart's tasks and conversations are what their scripts write, and every task can be solved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from demo import sft_examples, tasks
from demo.arithmetic import evaluate
from demo.calculator import server
from demo.sft_examples import COUNTS, SFT_DIR, example_files

from agentrl.chat.parsers.parser import get_parser

ROOT = Path(__file__).parents[4]
TASK_DIR = ROOT / "assets/tasks"
FILES = sorted(tasks.task_files())


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASK_DIR / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("main", "folder", "names"),
    [(tasks.main, TASK_DIR, FILES), (sft_examples.main, ROOT / SFT_DIR, sorted(COUNTS))],
    ids=["tasks", "sft"],
)
def test_the_generators_write_the_committed_bytes(
    tmp_path: Path, main: Callable[[list[str]], int], folder: Path, names: list[str]
) -> None:
    assert main([str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_the_folder_of_conversations_has_no_other_files() -> None:
    assert sorted(path.name for path in (ROOT / SFT_DIR).iterdir()) == sorted(COUNTS)


@pytest.mark.parametrize("name", FILES)
def test_every_task_is_arithmetic_with_its_value(name: str) -> None:
    found = read(name)
    assert len({task["id"] for task in found}) == len({task["query"] for task in found}) == len(found)
    for task in found:
        expression = task["query"].removeprefix("What is ").removesuffix("?")
        assert evaluate(expression) == task["answer"]
        assert task["tools"] == ["calculator"]
        assert (task["scorer"], task["answer_schema"], task["agent_name"]) == ("exact", "answer", "react")


def test_training_and_evaluation_ask_different_questions() -> None:
    train = {task["query"] for task in read("calculator_train.jsonl")}
    held_out = {task["query"] for task in read("calculator_eval.jsonl")}
    assert not train & held_out
    assert not {tasks.QUESTION.format(example) for example in tasks.EXAMPLES} & (train | held_out)


def test_the_worked_examples_call_the_tool_that_the_parser_reads() -> None:
    parsed = get_parser("hermes").parse(tasks.call_text("5 * 7"), ())
    assert tasks.worked_examples()[2]["tool_calls"] == [tasks.tool_call("5 * 7")]
    assert parsed.error is None
    (found,) = parsed.tool_calls
    assert (found.name, found.arguments) == ("calculate", {"expression": "5 * 7"})


async def test_the_schema_names_what_the_server_offers() -> None:
    (offered,) = await server.list_tools()
    (known,) = (tool["function"] for tool in tasks.CALCULATOR_TOOLS)
    assert (offered.name, offered.description) == (known["name"], known["description"])
    assert offered.input_schema["required"] == known["parameters"]["required"]
    (argument,) = offered.input_schema["properties"].values()
    assert argument["type"] == "string"


def test_every_line_is_a_conversation_with_the_tool() -> None:
    for name, lines in example_files().items():
        assert len(lines) == COUNTS[name]
        conversations = [json.loads(line) for line in lines]
        assert all(item["tools"] == tasks.CALCULATOR_TOOLS for item in conversations)
        calls = [any("tool_calls" in message for message in item["messages"]) for item in conversations]
        assert all(calls) is (name != "tiny_mixed.jsonl")
        assert 0.2 < sum(calls) / len(calls) <= 1.0
