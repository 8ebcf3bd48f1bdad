"""Which steps the weights of a step contain, after any history of going back."""

from __future__ import annotations

import random

from agentrl.documents.document import now
from agentrl.documents.training import TrainStep
from agentrl.lab.retract import contained_steps


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
