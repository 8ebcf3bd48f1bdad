"""The trajectories and commands that the quickstart shows at its end."""

import sys
from pathlib import Path

import pytest
from model_calls import model_call, record

from agentrl.documents.document import now
from agentrl.documents.model_call import ToolExecution
from agentrl.documents.status import RecordStatus
from agentrl.local.quickstart import (
    WorthReading,
    choose_worth_reading,
    excerpt_lines,
    own_command,
    worth_reading_lines,
)
from agentrl.screens.views.pipelines import TrajectoryRow
from agentrl.screens.views.read import WholeTrajectory


def row(number: int, score: float | None, tokens: int) -> TrajectoryRow:
    return TrajectoryRow(
        id=f"train/0/calc-{number:04d}/0/1", split="train", epoch=0, task="train/0/calc", traj_id=0,
        attempt=1, status=RecordStatus.READY, query="What is 2 + 2?", score=score, generated_tokens=tokens,
        created_at=now(),
    )  # fmt: skip


def test_the_first_wrong_the_first_right_and_the_longest_of_the_others_are_chosen():
    rows = [row(0, None, 99), row(1, 0.0, 50), row(2, 0.0, 20), row(3, 1.0, 10), row(4, 1.0, 40)]
    chosen = choose_worth_reading(list(reversed(rows)))
    assert [(title, item.id[-8:-4]) for title, item in chosen] == [
        ("first wrong", "0001"), ("first right", "0003"), ("longest", "0004"),
    ]  # fmt: skip


@pytest.mark.parametrize("scores", [[], [None], [1.0], [0.0]])
def test_few_trajectories_are_no_error(scores):
    chosen = choose_worth_reading([row(number, score, 5) for number, score in enumerate(scores)])
    assert len(chosen) == sum(score is not None for score in scores)


def test_an_excerpt_shows_calls_results_and_what_was_expected_without_control_characters():
    asked = record(query="What is 2 + 2?", answer="4", final_answer="5")
    tool = ToolExecution(
        name="calculate", arguments={"expression": "2 + 3"}, result="5", error=False, seconds=0.1
    )
    call = model_call(asked.id, 0, response={"content": ""}, tool_executions=(tool,))
    answer = model_call(asked.id, 1, 0, response={"content": "<answer>5</answer>\x1b[31m\n"})
    assert excerpt_lines(WholeTrajectory(record=asked, calls=[call, answer])) == (
        "question  What is 2 + 2?",
        'model     calculate({"expression": "2 + 3"}) = 5',
        "model     <answer>5</answer>",
        "expected  4",
    )


def test_each_trajectory_is_followed_by_the_command_that_shows_it():
    item = WorthReading("longest", "train/0/calc-0001/0/1", 0.0, 3, 61, ("question  What is 2 + 2?",))
    lines = worth_reading_lines([item], "agentrl audit record", "quickstart")
    assert lines[1] == "  longest: score 0, policy version 3, 61 generated tokens"
    assert lines[3] == "      agentrl audit record train/0/calc-0001/0/1 --run_name quickstart"
    assert worth_reading_lines([], "agentrl audit record", "quickstart") == []


def test_the_command_is_a_name_on_the_path_and_else_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "agentrl").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert own_command() == ".venv/bin/agentrl"
    monkeypatch.chdir("/")
    assert own_command() == str(folder / "agentrl").removeprefix("/")
    monkeypatch.chdir(folder.parent / "bin")
    monkeypatch.setenv("PATH", str(folder))
    assert own_command() == "agentrl"
