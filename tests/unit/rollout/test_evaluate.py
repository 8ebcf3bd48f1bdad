"""Test the numbers of an evaluation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from agentrl.rollout.evaluate import (
    EvaluatedTask,
    failure_lines,
    pass_at_k,
    report_table,
    split_name,
    summarize_tasks,
)


def task(
    *scores: float, scorer: str = "exact", failed: int = 0, failures: tuple[str, ...] = ()
) -> EvaluatedTask:
    return EvaluatedTask(
        scorer=scorer,
        agent="react",
        scores=scores,
        failed=failed,
        failures=failures,
        turns=(2,) * len(scores),
    )


def test_pass_at_k_is_the_chance_of_a_pass_among_k() -> None:
    assert pass_at_k(4, 2, 1) == 0.5
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert pass_at_k(4, 2, 4) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0
    with pytest.raises(ValueError, match="pass@5 of 4"):
        pass_at_k(4, 1, 5)


def test_tasks_count_alike_and_failures_in_no_mean() -> None:
    row = summarize_tasks([task(1, 1, 1, 1), task(0, 0.4, failed=2, failures=("engine",)), task(failed=1)])
    assert (row.tasks, row.scored, row.failed) == (3, 6, 3)
    assert row.mean_score == pytest.approx((1 + 0.2) / 2)
    assert row.pass_rate == 0.5
    assert row.pass_at == {1: 0.5, 2: 0.5}
    assert row.mean_turns == 2


def test_the_threshold_says_which_scores_pass() -> None:
    strict = replace(task(0.6, 0.9), right_threshold=0.8)
    assert (summarize_tasks([task(0.6, 0.9)]).pass_rate, summarize_tasks([strict]).pass_rate) == (1.0, 0.5)


def test_nothing_scored_gives_no_numbers() -> None:
    row = summarize_tasks([task(failed=1)])
    assert (row.mean_score, row.pass_rate, dict(row.pass_at)) == (None, None, {})


def test_the_table_has_a_row_for_each_scorer_and_one_for_all() -> None:
    console = Console(width=140, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(report_table("t", [task(1.0), task(0.0, scorer="math")]))
    text = captured.get()
    assert all(word in text for word in ("exact", "math", "all", "pass@1", "0.500"))


def test_failures_are_counted_by_kind() -> None:
    tasks = [task(failures=("engine", "tool")), task(failures=("engine",))]
    assert failure_lines(tasks) == ["engine: 2", "tool: 1"]


def test_an_evaluation_has_a_split_of_its_own() -> None:
    assert split_name(7, "") == "eval-v000007"
    assert split_name(7, "again") == "eval-v000007-again"
