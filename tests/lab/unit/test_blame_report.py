"""Blame without a run: the weights of steps, how many are blamed, groups with their sums, files, a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.documents.run import Evaluation
from agentrl.documents.training import TrainStep
from agentrl.errors import ConfigError
from agentrl.lab.blame import (
    Blame,
    ChangedTask,
    Effect,
    Weights,
    assign_weights,
    groups_of,
    show,
    to_json,
    write_files,
)
from agentrl.lab.flags import BlameConfig

WRONG = Effect(
    record="train/0/b/0/1", task="train/0/b", step=2, score=1.0, advantage=0.5, scorer="broken",
    tools=("search", "calculate"), min_version=1, max_version=1, effect=0.3,
)  # fmt: skip
RIGHT = replace(
    WRONG, record="train/0/a/0/1", task="train/0/a", scorer="exact", tools=(), min_version=0, effect=-0.1
)
EFFECTS = (WRONG, replace(WRONG, record="train/0/b/1/1", effect=0.1), RIGHT)


def evaluation(step: int) -> Evaluation:
    return Evaluation(
        id=f"eval-v{step:06d}-x", version=step, step=step, model=None, file="test.jsonl", tasks_digest="t",
        settings_digest="s", samples=1, right_threshold=0.5,
    )  # fmt: skip


BLAME = Blame(
    a=evaluation(0), b=evaluation(2), tasks=(ChangedTask(task_id="q", before=0.75, after=0.25),),
    measured=0.5, effects=EFFECTS, steps=(1, 2), weights=(0, 1), is_scaled=True, missing=4,
)  # fmt: skip


def steps(*numbers: int) -> list[TrainStep]:
    return [TrainStep(id=str(n), step=n, policy_version=n - 1, data=(), owner="me") for n in numbers]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(9, {0: [1, 2, 3], 4: [4, 5, 6, 7], 8: [8, 9]}), (2, {0: [1, 2, 3, 4, 5], 8: [6, 7, 8, 9]}),
     (1, {4: list(range(1, 10))})],
)  # fmt: skip
def test_a_step_gets_the_nearest_weights_to_those_it_began_with(
    limit: int, expected: dict[int, Sequence[int]]
) -> None:
    assigned = assign_weights(steps(*range(1, 10)), [Weights(step) for step in (0, 4, 8)], limit)
    assert {found.step: [step.step for step in part] for found, part in assigned.items()} == expected


@pytest.mark.parametrize(("top", "count"), [("5%", 5), ("0.5%", 1), ("7", 7), ("200", 100), ("100%", 100)])
def test_the_top_is_a_number_or_a_percentage(top: str, count: int) -> None:
    assert BlameConfig(top=top).top_of(100) == count


@pytest.mark.parametrize("top", ["0", "0%", "101%", "five", "-1", "5 %%", "1.5"])
def test_any_other_top_is_refused(top: str) -> None:
    with pytest.raises(ConfigError, match="--top is"):
        BlameConfig(top=top)


def test_groups_have_sums_and_say_how_many_of_them_are_blamed() -> None:
    groups = groups_of(BLAME, EFFECTS[:1], 20)
    broken, exact = groups["scorer"]
    assert (broken.name, broken.trajectories, broken.blamed) == ("broken", 2, 1)
    assert broken.effect.value == pytest.approx(0.4)
    assert broken.effect.low == pytest.approx(0.2)
    assert broken.effect.high == pytest.approx(0.6)
    assert (exact.name, exact.blamed, exact.effect.value) == ("exact", 0, pytest.approx(-0.1))
    assert [item.name for item in groups["tool"]] == ["search", "calculate", "no tool"]
    assert [item.name for item in groups["version"]] == ["1", "0–1"]
    assert [item.name for item in groups_of(BLAME, (), 1)["task"]] == ["train/0/b"]


def test_ids_and_the_table_are_written(tmp_path: Path) -> None:
    flags = BlameConfig(out=str(tmp_path / "ids.txt"), csv=str(tmp_path / "all.csv"))
    write_files(BLAME, EFFECTS[:2], flags)
    assert (tmp_path / "ids.txt").read_text(encoding="utf-8") == "train/0/b/0/1\ntrain/0/b/1/1\n"
    rows = (tmp_path / "all.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0].startswith("record,task,step,score,advantage,scorer,tools,")
    assert rows[1].endswith("broken,search calculate,1,1,0.3")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_files(BLAME, EFFECTS, BlameConfig(out=str(tmp_path / "missing" / "ids.txt")))


def test_the_page_and_the_json_say_what_was_found() -> None:
    console = Console(width=140, markup=False, highlight=False)
    with console.capture() as shown:
        show(BLAME, EFFECTS[:1], BlameConfig(limit=1), console)
    page = shown.get()
    assert "1 (fell): mean score 0.750 → 0.250" in page
    assert "+0.500 measured, +0.300 by the trajectories together" in page
    assert "3 of steps 1 to 2; 4 have no training data any more" in page
    content = json.loads(json.dumps(to_json(BLAME, EFFECTS[:1], BlameConfig())))
    assert (content["blamed"], content["trajectories"][0]["record"]) == (1, WRONG.record)
    assert content["tasks"] == [{"task_id": "q", "before": 0.75, "after": 0.25, "change": -0.5}]
