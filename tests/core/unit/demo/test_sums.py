"""The environment of sums: its questions, and that only the sum is right."""

from __future__ import annotations

import pytest
from demo.sums import Sums

from agentrl import ScorerContext, ScoreResult, TaskRequest


def test_its_questions_are_reproducible_and_have_their_sums() -> None:
    tasks, again = ([*Sums.tasks(TaskRequest(n=20, seed=1, split="train"))] for _ in range(2))
    assert tasks == again
    assert len({task["query"] for task in tasks}) > 15
    for task in tasks:
        left, right = task["query"].removeprefix("What is ").removesuffix("?").split(" + ")
        assert task["answer"] == str(int(left) + int(right))


@pytest.mark.parametrize(
    ("given", "score"), [("140", 1), (" 140\n", 1), ("141", 0), ("57 + 83", 0), (None, 0)]
)
def test_only_the_sum_is_right(given: str | None, score: float) -> None:
    context = ScorerContext(query="What is 57 + 83?", final_answer=given, answer="140")
    assert Sums.score(context) == ScoreResult(score)
