"""Before a load: a right answer, marked as the prompt asks, scores 1, or the load says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from json_rows import write_rows

from agentrl.documents.task_file import ReadResult
from agentrl.errors import TaskFileError
from agentrl.rollout.load_tasks import read_task_source
from agentrl.scoring.answers import unchecked, unscorable

BOXED = "1+1? Put it in \\boxed{}."
LINE = "1+1? The last line should be of the form Answer: $Answer."


def read(folder: Path, *rows: dict[str, Any]) -> ReadResult:
    return read_task_source(write_rows(folder / "rows.jsonl", *rows), shuffle=False)


@pytest.mark.parametrize("scorer", ["exact", "math", "agentcpm", {"exact": 0.8, "format": 0.2}])
@pytest.mark.parametrize(
    ("query", "schema"), [("1+1?", "answer"), (BOXED, "boxed"), ('After "####".', "####"), (LINE, "Answer:")]
)
async def test_a_schema_that_reads_what_the_prompt_asks_for(
    tmp_path: Path, query: str, schema: str, scorer: Any
) -> None:
    row = {"query": query, "answer": "2", "scorer": scorer, "answer_schema": schema}
    assert await unscorable(read(tmp_path, row).kinds) == []


@pytest.mark.parametrize("query", [BOXED, 'After "####".', LINE])
async def test_a_schema_that_reads_nothing_of_it_is_named_once_a_kind(tmp_path: Path, query: str) -> None:
    rows = [{"id": number, "query": query, "answer": str(number), "scorer": "exact"} for number in range(20)]
    problems = await unscorable(read(tmp_path, *rows).kinds)
    assert len(problems) == 1
    assert "task 0: the prompt asks for" in problems[0]
    assert "of which answer_schema answer reads nothing" in problems[0]


async def test_scorers_of_ones_own_and_tasks_without_an_answer_are_left_alone(tmp_path: Path) -> None:
    rows = [
        {"query": BOXED, "answer": {"a": 1}, "scorer": "my.module:score"},
        {"query": BOXED, "scorer": "rubric"},
        {"query": BOXED, "answer": ["assert f(1)"], "scorer": "code"},
    ]
    found = read(tmp_path, *rows)
    assert await unscorable(found.kinds) == []
    assert unchecked(found.kinds) == ["code", "my.module:score", "rubric"]


@pytest.mark.parametrize(
    ("answer", "schema"), [({"target": ["2"]}, "answer"), ([{"a": 1}], "answer"), ("#1", "####")]
)
def test_an_answer_that_a_judge_would_never_get_is_a_bad_line(
    tmp_path: Path, answer: Any, schema: str
) -> None:
    with pytest.raises(TaskFileError, match="scorer agentcpm cannot read the answer"):
        read(tmp_path, {"query": "?", "answer": answer, "answer_schema": schema})
