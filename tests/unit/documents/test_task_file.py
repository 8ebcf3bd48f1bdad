"""Task files: aliases, types, bad lines, order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.documents.task_file import read_tasks
from agentrl.errors import TaskFileError


def write(tmp_path: Path, *items: Any) -> Path:
    path = tmp_path / "tasks.jsonl"
    lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_one(tmp_path: Path, item: dict[str, Any]) -> Any:
    return read_tasks(write(tmp_path, item)).tasks[0]


@pytest.mark.parametrize(
    "name", ["q", "Question", "question", "query", "content", "instruction", "traj_question"]
)
def test_every_alias_of_the_query_is_read(tmp_path: Path, name: str) -> None:
    assert read_one(tmp_path, {"id": "x", name: "2+2?"}).query == "2+2?"


@pytest.mark.parametrize(
    "name", ["a", "Final answer", "Final Answer", "Final sample answer", "answer", "expected_answer"]
)
def test_every_alias_of_the_answer_is_read(tmp_path: Path, name: str) -> None:
    task = read_one(tmp_path, {"task_id": 7, "query": "?", name: [4]})
    assert (task.task_id, task.id, task.answer, task.meta) == ("7", "train/0/7", [4], {})


def test_query_and_answer_come_from_messages_and_raw(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    task = read_one(tmp_path, {"id": "x", "raw": {"messages": messages, "expected_answer": "e"}})
    assert (task.query, task.answer) == ("u", "e")
    assert task.meta["raw"]["messages"] == messages
    assert read_one(tmp_path, {"id": "x", "messages": messages}).query == "u"


def test_all_fields_and_the_rest_in_meta(tmp_path: Path) -> None:
    task = read_one(
        tmp_path,
        {
            "id": "x", "query": "?", "aug_answers": ["a", 1], "scorer": "math", "answer_schema": "boxed",
            "agent_name": "react", "system_prompt": "s", "query_prompt": "Q: {query}", "tools": [],
            "max_turns": 3, "level": 5, "meta": {"from": "here"},
        },
    )  # fmt: skip
    assert (task.scorer, task.answer_schema, task.agent_name, task.tools) == ("math", "boxed", "react", ())
    assert (task.aug_answers, task.max_turns, task.query_prompt) == (("a", 1), 3, "Q: {query}")
    assert task.meta == {"level": 5, "from": "here"}
    defaults = read_one(tmp_path, {"id": "x", "query": "?"})
    assert (defaults.scorer, defaults.answer_schema, defaults.tools) == ("agentcpm", "answer", None)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON"),
        ('{"id": "x", "query": "?", "answer": NaN}', "not JSON: NaN"),
        ('"text"', "a task is a JSON object"),
        ('{"id": "x"}', "query is missing"),
        ('{"id": "x", "query": ""}', "query is empty"),
        ('{"id": "x", "query": 3}', "query is a number"),
        ('{"query": "?"}', "id is missing"),
        ('{"id": true, "query": "?"}', "id is true or false"),
        ('{"id": "x", "query": "?", "tools": "calc"}', "tools is text"),
        ('{"id": "x", "query": "?", "tools": [1]}', "tools is a list of the names"),
        ('{"id": "x", "query": "?", "max_turns": 0}', "max_turns is 0"),
        ('{"id": "x", "query": "?", "max_turns": "3"}', "max_turns is text"),
        ('{"id": "x", "query": "?", "query_prompt": "Q"}', "does not hold {query}"),
        ('{"id": "x", "query": "?", "scorer": 1}', "scorer is a number"),
        ('{"id": "ok", "query": "again"}', "id 'ok' is used above"),
        ('{"id": "x", "query": "?", "scorer": "nope"}', "scorer 'nope' is none of math"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_loaded(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path, {"id": "ok", "query": "?", "scorer": "math"}, line)
    with pytest.raises(TaskFileError) as caught:
        read_tasks(path, known_scorers=["math"] if "nope" in line else None)
    assert f"{path}:2: " in caught.value.message
    assert reason in caught.value.message
    result = read_tasks(path, skip_bad_lines=True, known_scorers=["math"] if "nope" in line else None)
    assert [task.task_id for task in result.tasks] == ["ok"]
    assert len(result.skipped) == 1


def test_json_list_reports_the_line_of_an_item(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text('[\n {"id": 1, "query": "?"},\n {"id": 2}\n]\n', encoding="utf-8")
    with pytest.raises(TaskFileError, match=r"tasks\.json:3: query is missing"):
        read_tasks(path)
    assert len(read_tasks(path, skip_bad_lines=True).tasks) == 1
    path.write_text('[{"id": 1, "query": "?"},\n {"id": ', encoding="utf-8")
    with pytest.raises(TaskFileError, match=r"tasks\.json:2: the JSON list"):
        read_tasks(path)


def test_order_is_shuffled_by_seed(tmp_path: Path) -> None:
    path = write(tmp_path, *({"id": number, "query": "?"} for number in range(20)))

    def ids(**options: Any) -> list[str]:
        tasks = read_tasks(path, **options).tasks
        assert [task.order for task in tasks] == list(range(20))
        return [task.task_id for task in tasks]

    assert ids(shuffle=False) == [str(number) for number in range(20)]
    assert ids(seed=1) == ids(seed=1) != ids(seed=2)
    assert [slot.traj_id for slot in read_tasks(path, num_generations=3).tasks[0].slots] == [0, 1, 2]


def test_missing_empty_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="cannot be read"):
        read_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TaskFileError, match="holds no tasks"):
        read_tasks(write(tmp_path, ""))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskFileError, match="not UTF-8"):
        read_tasks(tmp_path / "binary")
