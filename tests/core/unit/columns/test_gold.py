"""A gold slice: what its file may hold, and that a judge is asked anew, within limits, by its own name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM, fake_llm

from agentrl.columns.gold import MAX_GOLD, GoldRow, judge_rows, read_gold
from agentrl.config.schema import SamplingConfig
from agentrl.errors import ConfigError
from agentrl.scoring import judge
from agentrl.scoring.judge import SharedAnswers
from agentrl.scoring.scorers import ScorerContext, run_scorer

GOOD = {"query": "Capital?", "answer": "Paris", "final_answer": "the city of light", "score": 1}


def write(folder: Path, *rows: object) -> str:
    path = folder / "gold.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_rows_of_an_audit_are_read_and_their_other_keys_ignored(tmp_path: Path) -> None:
    gold = read_gold(write(tmp_path, {**GOOD, "turns": 3, "id": "r"}, "", {**GOOD, "scorer": "exact"}))
    assert gold is not None
    assert [(row.scorer, row.score, row.answer) for row in gold.rows] == [
        ("agentcpm", 1, "Paris"), ("exact", 1, "Paris"),
    ]  # fmt: skip
    lines = {**GOOD, "final_answer": "one\u2028two\x85three"}
    (row,) = (read_gold(write(tmp_path, "\ufeff" + json.dumps(lines, ensure_ascii=False))) or gold).rows
    assert row.final_answer == lines["final_answer"]
    again = read_gold(write(tmp_path, GOOD))
    assert again is not None
    assert again.digest != gold.digest
    assert read_gold(None) is None


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "has 0 rows"),
        ([GOOD] * (MAX_GOLD + 1), f"has {MAX_GOLD + 1} rows, and may have 1 to {MAX_GOLD}"),
        ([GOOD, "{"], "gold.jsonl:2 is no JSON"),
        (["3"], "gold.jsonl:1 is no JSON object"),
        ([{**GOOD, "score": "good"}], "gold.jsonl:1: score is 'good'; it must be a number"),
        ([{"query": "q"}], "gold.jsonl:1: 'score' is missing"),
        ([{**GOOD, "scorer": "agentcmp"}], "agentcmp"),
    ],
)
def test_a_wrong_slice_is_named(tmp_path: Path, rows: list[Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_gold(write(tmp_path, *rows))
    assert problem in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_gold(str(tmp_path / "none.jsonl"))


@pytest.fixture
async def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeLLM]:
    monkeypatch.setattr(judge, "_answers", SharedAnswers())
    async with fake_llm(tmp_path) as server:
        yield server


async def test_the_judge_is_asked_anew_and_its_failures_are_no_scores(llm: FakeLLM) -> None:
    llm.replies = {"a": ["Correct", "Incorrect", "Correct"]}
    path = llm.write_config("scorer_agent", "a", max_retries=1, input_price=10_000)
    sampling = SamplingConfig(agent_config_path=path, scorer_timeout_seconds=20)
    row = GoldRow(**GOOD)
    context = ScorerContext(
        query=row.query, final_answer=row.final_answer, answer=row.answer, agent_config_path=path
    )
    assert (await run_scorer("agentcpm", context, 20)).score == 1.0
    (scored,) = await judge_rows([row], sampling)
    assert (scored.score, scored.model, scored.expected, scored.cost) == (0.0, "a", 1.0, 1.0)
    assert scored.tokens > 0
    assert (await run_scorer("agentcpm", context, 20)).details["cached"]  # the cache is as it was
    same = GoldRow(query="Capital?", answer="Paris", final_answer="Paris", score=1.0)
    (equal,) = await judge_rows([same], sampling)
    assert (equal.score, equal.model, equal.tokens) == (1.0, None, 0)  # no judge was asked
    llm.replies = {"a": ["who knows"]}
    failed, unknown = await judge_rows([row, GoldRow(query="?", score=0.5, scorer="nobody")], sampling)
    assert (failed.score, failed.model) == (None, None)
    assert "no judge gave a verdict" in (failed.problem or "")
    assert "nobody" in (unknown.problem or "")


async def test_few_rows_are_judged_at_a_time(llm: FakeLLM) -> None:
    llm.replies, llm.seconds = {"a": ["Correct"]}, 0.05
    path = llm.write_config("scorer_agent", "a")
    rows = [GoldRow(query=f"{number}?", answer="x", final_answer="y", score=1.0) for number in range(12)]
    scores = await judge_rows(rows, SamplingConfig(agent_config_path=path))
    assert [row.score for row in scores] == [1.0] * 12
    assert llm.most_under_way <= 4
