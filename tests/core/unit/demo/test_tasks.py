"""The quickstart's task files are reproducible, and every task can be solved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from demo import tasks
from demo.arithmetic import evaluate
from demo.calculator import server

from agentrl.chat.parsers.parser import get_parser

TASK_DIR = Path(__file__).parents[4] / "assets/tasks"
FILES = sorted(tasks.task_files())


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASK_DIR / name).read_text(encoding="utf-8").splitlines()]


def test_the_generator_writes_the_committed_bytes(tmp_path: Path) -> None:
    assert tasks.main([str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (TASK_DIR / name).read_bytes(), name


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
