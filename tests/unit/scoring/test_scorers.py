"""Test the built-in scorers, and failures of scorers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.errors import ConfigError, ScorerError
from agentrl.scoring.scorers import SCORERS, ScorerContext, run_scorer


def context(final_answer: str | None, answer: Any, *more: Any) -> ScorerContext:
    return ScorerContext(query="q", final_answer=final_answer, answer=answer, aug_answers=more)


async def score(name: str, given: ScorerContext, timeout: float = 60) -> float:
    return (await run_scorer(name, given, timeout)).score


@pytest.mark.parametrize(
    ("given", "gold", "expected"),
    [
        ("The  Eiffel Tower.", "eiffel tower", 1.0),
        ("1,000", 1000, 1.0),
        ("4.0", "4", 1.0),
        ("1,0,0", "100", 0.0),
        ("Ｐaris", "paris", 1.0),
        ("!", "?", 0.0),
        ("Lyon", ["Paris", "Lyon"], 1.0),
        (None, "Paris", 0.0),
    ],
)
async def test_exact(given: str | None, gold: Any, expected: float) -> None:
    assert await score("exact", context(given, gold)) == expected


async def test_further_answers_are_accepted() -> None:
    assert await score("exact", context("NYC", "New York", "nyc")) == 1.0


@pytest.mark.parametrize(
    ("given", "gold", "expected"),
    [("a big red dog", "the red dog", 0.8), ("cat", "dog", 0.0), ("", "dog", 0.0), (None, "dog", 0.0)],
)
async def test_f1(given: str | None, gold: str, expected: float) -> None:
    assert await score("f1", context(given, gold)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "gold", "expected"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        ("(x+1)^2", "x^2+2x+1", 1.0),
        ("12", "13", 0.0),
        ("banana", "3", 0.0),
        (None, "3", 0.0),
    ],
)
async def test_math(given: str | None, gold: str, expected: float) -> None:
    assert await score("math", context(given, gold)) == expected


@pytest.mark.parametrize("name", ["exact", "f1", "math", "agentcpm"])
async def test_a_task_without_an_answer_cannot_be_scored(name: str) -> None:
    with pytest.raises(ScorerError, match="the task has no answer"):
        await score(name, context("4", None))


async def raises(_: ScorerContext) -> float:
    raise ZeroDivisionError("oops")


async def hangs(_: ScorerContext) -> float:
    await asyncio.Event().wait()
    return 1.0


async def returns_text(_: ScorerContext) -> Any:
    return "good"


async def returns_nan(_: ScorerContext) -> float:
    return float("nan")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "raised ZeroDivisionError: oops"),
        ("hangs", "longer than 0.05 s"),
        ("returns_text", "returned 'good'"),
        ("returns_nan", "returned nan"),
    ],
)
async def test_what_goes_wrong_is_a_failure_and_never_a_zero(name: str, problem: str) -> None:
    with pytest.raises(ScorerError, match=problem):
        await score(f"{__name__}:{name}", context("4", "4"), timeout=0.05)


async def test_a_scorer_that_cannot_be_imported_is_no_failure_of_a_trajectory() -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        await score(f"{__name__}:not_there", context("4", "4"), timeout=0.05)


def test_an_unknown_scorer_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'exact'"):
        SCORERS.get("exac")
    assert {"agentcpm", "asearcher", "exact", "f1", "math"} <= set(SCORERS.names())


async def test_the_example_scorer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("assets/examples")
    name = "custom_scorer:close_number"
    assert await score(name, context("42", "42")) == 1.0
    assert await score(name, context("21", "42")) == 0.5
    details = (await run_scorer(name, context("many", "42"), 5)).details
    assert details == {"why": "no number", "scorer": name}
