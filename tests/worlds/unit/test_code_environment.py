"""The environment ``code``: tasks of a file, a sandbox per trajectory, the scorer on the last program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from json_rows import write_rows
from test_environment_rollout import play
from trajectories import score_trajectory

from agentrl.config.schema import SamplingConfig
from agentrl.errors import TaskFileError
from agentrl.rollout.load_tasks import read_task_source

PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"


async def test_programs_are_tried_and_the_last_one_is_tested(tmp_path: Path) -> None:
    problem = {"query": "Print the sum.", "answer": [{"input": "1 2", "output": "3"}]}
    file = write_rows(tmp_path / "problems.jsonl", *({"id": f"sum{at}", **problem} for at in range(3)))
    found = read_task_source(f"env:code?file={file}&n=2", shuffle=False).tasks
    assert [(task.task_id, task.scorer, task.agent_name) for task in found] == [
        ("sum0", "code", "react"), ("sum1", "code", "react"),
    ]  # fmt: skip
    arguments = json.dumps({"name": "run_python", "arguments": {"code": "print(20 + 3)"}})
    answer = f"<answer>{PROGRAM}</answer>"
    rollout, outcome = await play(found[0], "react", f"<tool_call>{arguments}</tool_call>", answer)
    (result,) = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert result == "23"
    assert (await score_trajectory(found[0], rollout, outcome, SamplingConfig())).score == 1.0


def test_a_file_that_is_missing_or_invalid_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="env:code names no file"):
        read_task_source("env:code?n=2")
    file = tmp_path / "problems.jsonl"
    file.write_text('{"id": 1\n')
    with pytest.raises(TaskFileError, match=r"problems.jsonl:1"):
        read_task_source(f"env:code?n=2&file={file}")
