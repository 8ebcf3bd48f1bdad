"""What a retraction decides: the steps that weights contain, log lines that go, a new decision."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agentrl.documents.document import now
from agentrl.documents.training import TrainStep
from agentrl.lab.regroup import decided
from agentrl.lab.retract import contained_steps, remove_lines
from agentrl.store.groups import GroupOutcome


def step(attempt: int, number: int, *, is_committed: bool = True) -> TrainStep:
    return TrainStep(
        id=f"{attempt}/{number}", step=number, policy_version=0, data=(), owner="t",
        committed_at=now() if is_committed else None,
    )  # fmt: skip


def test_any_history_is_told_from_attempts_alone() -> None:
    """Trainers go back to any step, commit some more, and leave plans; nothing reads a clock."""
    choose = random.Random(7)
    for _ in range(200):
        every: list[TrainStep] = []
        alive: list[str] = []
        expected: dict[str, set[str]] = {}
        for attempt in range(1, 6):
            del alive[choose.randint(0, len(alive)) :]
            for number in range(len(alive) + 1, len(alive) + choose.randint(1, 4)):
                every.append(step(attempt, number))
                alive.append(every[-1].id)
                expected[alive[-1]] = set(alive)
            if choose.random() < 0.5:
                every.append(step(attempt, len(alive) + 1, is_committed=False))
        choose.shuffle(every)
        found = {item.id: contained_steps(item, every) for item in every if item.committed_at}
        assert found == expected


def test_a_child_contains_the_steps_that_it_copied() -> None:
    every = [step(3, 1), step(5, 2), step(1, 3)]
    assert contained_steps(every[2], every) == {"3/1", "5/2", "1/3"}


RECORD = "train/0/a/0/1"


@pytest.mark.parametrize(
    ("name", "writer", "removed"),
    [
        ("math_train_h-1.log", "math/train-h-1", 1),
        ("math_train_h-1.log.2", "math/train-h-1", 1),
        ("math_2_train_h-1.log", "math_2/train-h-1", 0),
        ("math_local_h-1.log", None, 1),  # what an engine prints has another form
        ("maths_train_h-1.log", "maths/train-h-1", 0),
        ("math_train_h-1.txt", "math/train-h-1", 0),
    ],
)
def test_a_file_of_a_run_with_a_longer_name_stays(
    tmp_path: Path, name: str, writer: str | None, removed: int
) -> None:
    begin = "" if writer is None else f"2026-11-29 01:00:00 INFO    {writer}  "
    lines = [f"{begin}scored {RECORD}\n", f"{begin}scored {RECORD}0\n"]
    (tmp_path / name).write_text("".join(lines))
    assert remove_lines(tmp_path, "math", [RECORD]) == removed
    assert (tmp_path / name).read_text() == "".join(lines[removed:])


def test_a_new_decision_takes_back_what_withheld_the_group_from_training() -> None:
    earlier = {"outcome": "mixed", "finalized_at": "then", "kept_as_trained": True, "problem": "none"}
    changes = decided({"group": earlier}, GroupOutcome(summary={"outcome": "agree"}))
    assert changes["group"] == {"$literal": {"outcome": "agree", "finalized_at": "then"}}
    assert "ease" not in changes
