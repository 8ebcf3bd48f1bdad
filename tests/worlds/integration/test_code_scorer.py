"""The scorer ``code``: programs against input/output tests and assertions, in the real sandbox."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.errors import ScorerError
from agentrl.scoring.scorers import ScorerContext, ScoreResult, run_scorer
from agentrl.worlds.code import program_of, read_tests

pytestmark = pytest.mark.integration

SUMS = [{"input": "1 2\n", "output": "3"}, {"input": "4 5", "output": "9\n"}]
SQUARE = ["assert square(3) == 9", "assert square(-2) == 4\nassert square(0) == 0"]


async def _score(program: str | None, answer: Any) -> ScoreResult:
    return await run_scorer("code", ScorerContext(query="q", final_answer=program, answer=answer), 60)


async def test_a_program_is_scored_by_the_outputs_that_it_prints() -> None:
    right = await _score("a, b = map(int, input().split())\nprint(a + b, ' ')", SUMS)
    half = await _score("print(3)", {"inputs": ["1 2", "4 5"], "outputs": ["3", "9"]})
    crash = await _score("```python\nprint(int(input()))\n```", json.dumps({"tests": SUMS}))
    assert (right.score, right.details["passed"]) == (1.0, 2)
    assert half.score == 0.5
    assert half.details["first_problem"] == "printed '3\\n' instead of '9'"
    assert crash.score == 0.0
    assert "ValueError" in crash.details["first_problem"]


async def test_a_program_is_scored_by_assertions() -> None:
    assert (await _score("def square(x): return x * x", SQUARE)).score == 1.0
    assert (await _score("def square(x): return abs(x) * 3", SQUARE)).score == 0.5
    assert (await _score(None, SQUARE)).score == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import sys; print(sys.stdin.read()); sys.exit(0)",
        "import sys; print(open(sys.argv[0]).read()); sys.exit(0)",
        "while True: pass",
    ],
)
async def test_a_program_that_ends_before_its_tests_passes_none(program: str) -> None:
    tests = {"tests": ["assert False"], "sandbox": {"cpu_seconds": 1, "seconds": 5}}
    assert (await _score(program, tests)).score == 0.0


def test_the_last_fenced_block_is_the_program() -> None:
    assert program_of("First:\n```python\na\n```\nthen\n```py\nb\n```\n") == "b\n"
    assert program_of("print(1)") == "print(1)"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        3,
        "{",
        {"inputs": ["1"], "outputs": []},
        [{"input": "1"}],
        {"tests": SUMS, "sandbox": {"files": 0}},
    ],
)
def test_a_task_without_tests_is_an_error_of_the_task(answer: Any) -> None:
    with pytest.raises(ScorerError):
        read_tests(answer)
