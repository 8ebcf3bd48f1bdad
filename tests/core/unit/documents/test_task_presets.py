"""Rows of other systems as tasks: each preset, how it is chosen, and ``--task_fields``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from json_rows import write_rows

from agentrl.documents.task import Task
from agentrl.documents.task_file import read_tasks
from agentrl.documents.task_json import BadTaskError, make_task
from agentrl.documents.task_presets import TaskRows
from agentrl.errors import ConfigError, TaskFileError

USER = {"role": "user", "content": "1+1?"}
GSM8K = {"question": "How many?", "answer": "48/2=<<48/2=24>>24\n48+24=72\n#### 72"}
VERL = {
    "data_source": "openai/gsm8k", "prompt": [USER], "ability": "math", "agent_name": "react",
    "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 7},
}  # fmt: skip
DAPO = "1+1?\n\nThe last line of your response should be of the form Answer: $Answer (without quotes)."
TESTS = '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'


def task_of(row: dict[str, Any], number: int = 3, *, preset: str = "auto", fields: str = "") -> Task:
    return make_task(TaskRows.parse(preset, fields).read(row, number)[0], "train", 2)


def test_a_row_of_verl_is_a_task() -> None:
    task = task_of(VERL)
    assert (task.task_id, task.query, task.answer, task.agent_name) == (
        "openai/gsm8k/7", "1+1?", "2", "react",
    )  # fmt: skip
    assert task.meta == {key: VERL[key] for key in ("data_source", "ability", "reward_model", "extra_info")}


@pytest.mark.parametrize(
    ("question", "truth", "schema", "scorer", "answer"),
    [
        ('1+1? Output the final answer after "####".', "2", "####", "math", "2"),
        ("1+1? Put it in \\boxed{}.", "\\frac{4}{2}", "boxed", "math", "\\frac{4}{2}"),
        ("1+1?", "One and one is two.\n#### 2", "answer", "agentcpm", "2"),
    ],
)
def test_a_row_of_verl_or_chatlearn_says_how_answers_are_marked(
    question: str, truth: str, schema: str, scorer: str, answer: str
) -> None:
    row = {**VERL, "prompt": [{"role": "user", "content": question}], "reward_model": {"ground_truth": truth}}
    task = task_of(row)
    assert (task.answer_schema, task.scorer, task.answer) == (schema, scorer, answer)
    own = task_of({**row, "scorer": "exact", "answer_schema": "answer"})
    assert (own.answer_schema, own.scorer) == ("answer", "exact")
    assert task_of({**row, "environment": "game"}).scorer == "environment"
    assert task_of({"id": 1, "query": question}).answer_schema == "answer"


@pytest.mark.parametrize(
    ("preset", "row", "read"),
    [
        ("gsm8k", GSM8K, ("3", "How many?", "72", "math", "boxed")),
        ("math", {"problem": "p", "solution": "so \\boxed{\\frac{1}{2}}.", "level": "Level 5"},
         ("3", "p", "\\frac{1}{2}", "math", "boxed")),
        ("math", {"problem": "p", "solution": "…", "answer": "4", "unique_id": "test/1.json"},
         ("test/1.json", "p", "4", "math", "boxed")),
        ("math", {"problem": "p", "answer": "4", "messages": [USER, {"role": "assistant", "content": "4"}]},
         ("3", "p", "4", "math", "boxed")),
        ("trl", {"prompt": "p", "solution": "$\\frac12$"}, ("3", "p", "\\frac12", "math", "boxed")),
        ("trl", {"prompt": [USER], "ground_truth": "2"}, ("3", "1+1?", "2", "math", "boxed")),
        ("trl", {"prompt": [USER], **GSM8K, "answer": "72"}, ("3", "1+1?", "72", "math", "boxed")),
        ("trl", {"prompt": [USER], "label": "2"}, ("3", "1+1?", "2", "math", "boxed")),
        ("trl", {"prompt": DAPO, "label": "2"}, ("3", DAPO, "2", "math", "Answer:")),
        ("trl", {"prompt": "p", "label": True}, ("3", "p", None, "agentcpm", "answer")),
        ("trl", {"prompt": "p"}, ("3", "p", None, "agentcpm", "answer")),
        ("messages", {"messages": [USER], "reference_answer": "2"}, ("3", "1+1?", "2", "agentcpm", "answer")),
        ("chatlearn", {**VERL, "agent_cfg_path": "a.yml"},
         ("openai/gsm8k/7", "1+1?", "2", "agentcpm", "answer")),
        ("original", {"id": 1, "raw": {"messages": [USER], "expected_answer": "2"}},
         ("1", "1+1?", "2", "agentcpm", "answer")),
        ("task", {"id": 1, "prompt": [USER], "answer": "2"}, ("1", "1+1?", "2", "agentcpm", "answer")),
        ("task", {"id": 1, **GSM8K}, ("1", "How many?", "72", "agentcpm", "answer")),
        ("task", {"query": "?"}, ("3", "?", None, "agentcpm", "answer")),
        ("verl", {**VERL, "prompt": [{"role": "user", "content": DAPO}]},
         ("openai/gsm8k/7", DAPO, "2", "math", "Answer:")),
        ("verl", {**VERL, "reward_model": {"ground_truth": {"target": ["Bell", "A. Bell"]}}},
         ("openai/gsm8k/7", "1+1?", ["Bell", "A. Bell"], "agentcpm", "answer")),
        ("verl", {**VERL, "reward_model": {"ground_truth": TESTS}},
         ("openai/gsm8k/7", "1+1?", TESTS, "code", "answer")),
        ("choices", {"question": "1+1?", "choices": ["1", "2", "3"], "answer": 1, "subject": "maths"},
         ("3", "1+1?\n\nA. 1\nB. 2\nC. 3", "B", "exact", "answer")),
        ("choices", {"id": "arc", "question": "1+1?", "answerKey": "2",
                     "choices": {"text": ["two", "one"], "label": ["2", "1"]}},
         ("arc", "1+1?\n\n2. two\n1. one", "2", "exact", "answer")),
        ("choices", {"question": "1+1?", "options": ["1", "2"], "answer": "B", "answer_index": 1},
         ("3", "1+1?\n\nA. 1\nB. 2", "B", "exact", "answer")),
        ("choices", {"question": "1+1?", "option_a": "1", "option_b": "2", "answer": "(b)"},
         ("3", "1+1?\n\nA. 1\nB. 2", "B", "exact", "answer")),
        ("choices", {"question": "1+1?", "opa": "1", "opb": "2", "cop": 1},
         ("3", "1+1?\n\nA. 1\nB. 2", "B", "exact", "answer")),
        ("choices", {"question": "1+1?", "A": "1", "B": "2", "answer": "B"},
         ("3", "1+1?\n\nA. 1\nB. 2", "B", "exact", "answer")),
        ("choices", {"question": "1+1?", "options": ["(A) 1", "(B) 2"], "answer": "B"},
         ("3", "1+1?\n\nA. 1\nB. 2", "B", "exact", "answer")),
        ("choices", {"question": "1+1?", "options": {"A": "1", "B": "2"}, "answer": "2"},
         ("3", "1+1?\n\nA. 1\nB. 2", "B", "exact", "answer")),
        ("conversations", [{"from": "human", "value": "1+1?"},
                           {"from": "assistant", "ground_truth": {"value": "2"}}],
         ("3", "1+1?", "2", "math", "boxed")),
        ("conversations",
         {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
         ("3", "1+1?", None, "agentcpm", "answer")),
    ],
)  # fmt: skip
def test_a_preset_is_known_by_the_fields_of_a_row(
    preset: str, row: dict[str, Any], read: tuple[str | None, ...]
) -> None:
    assert TaskRows().read(row, 3)[1] == preset
    task = task_of(row)
    assert (task.task_id, task.query, task.answer, task.scorer, task.answer_schema) == read
    assert task.messages == ()


def test_a_preset_is_forced_or_off() -> None:
    assert task_of({"id": 1, **GSM8K}, preset="gsm8k").scorer == "math"
    assert task_of({"id": 1, **GSM8K, "scorer": "exact"}, preset="gsm8k").scorer == "exact"
    assert task_of(GSM8K, preset="none").scorer == "agentcpm"
    with pytest.raises(BadTaskError, match="query is missing"):
        task_of({"id": 1}, preset="math")
    with pytest.raises(BadTaskError, match=r"the solution has no \\boxed"):
        task_of({"problem": "p", "solution": "it is 4"})


def test_fields_are_read_from_columns_and_given_values() -> None:
    row = {"Q": {"text": "why?"}, "choices": ["3", "4"], "question": "other", "n": 2, "picture": "a.png"}
    rows = TaskRows.parse("auto", "query=Q.text, answer=choices.1, scorer:=my.module:score, max_turns=n")
    task = make_task(rows.read(row, 0)[0], "train", 1)
    assert (task.query, task.answer, task.scorer, task.max_turns) == ("why?", "4", "my.module:score", 2)
    assert task.meta == {
        "Q": {"text": "why?"}, "choices": ["3", "4"], "question": "other", "picture": "a.png",
    }  # fmt: skip
    assert TaskRows.parse("auto", "images=picture").read({**row, "query": "?"}, 0)[0]["images"] == ["a.png"]
    assert task_of(VERL, fields="answer=extra_info.split").answer == "train"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ("query", "'query' is not FIELD=COLUMN"),
        ("query=", "'query=' is not FIELD=COLUMN"),
        ("query=a,query:=b", "'query:=b' is given twice"),
        ("qeury=a", "a task has no field 'qeury'"),
    ],
)
def test_malformed_fields_are_refused(fields: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TaskRows.parse("auto", fields)


def test_a_file_says_how_its_rows_are_read(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", GSM8K, {"id": "own", "query": "?"})
    read = read_tasks(file, shuffle=False)
    assert [task.task_id for task in read.tasks] == ["0", "own"]
    assert read.presets == {"gsm8k": 1, "task": 1}
    assert read.reading is not None
    assert "read as gsm8k: query ← question, answer ← the number behind ####" in read.reading
    assert f"first: {file}:1: query 'How many?', answer '72', id '0', scorer math" in read.reading
    with pytest.raises(TaskFileError, match="no row has 'nope' of --task_fields") as caught:
        read_tasks(file, rows=TaskRows.parse("auto", "answer=nope"))
    assert caught.value.hint == "the columns of the first row are question, answer"
    assert read_tasks(write_rows(file, {"id": 1, "query": "?"})).reading is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 72", "72"), ("#### $72", "72"), ("#### -$5", "-5"), ("#### $-5.50", "-5.50"),
        ("#### 1,234.", "1,234"), ("#### 15%", "15"), ("#### 72 dollars", "72"), ("#### € 3", "3"),
        ("#### 1/2", "1/2"), ("#### 3x", "3x"), ("#### 10:30", "10:30"), ("#### −.5", "-.5"),
        (r"#### \$5", "5"), ("#### 5 million", "5 million"), ("#### 5 and a half", "5 and a half"),
        ("#### B", "B"), ("#### Summary", None),
    ],
)  # fmt: skip
def test_the_number_behind_the_last_hashes_is_the_answer(text: str, answer: str | None) -> None:
    solution = f"so it is\n{text}"
    assert task_of({"question": "?", "answer": solution}).answer == (answer or solution)


def test_the_text_of_a_choice_is_accepted_unless_it_is_another_letter() -> None:
    assert task_of({"question": "?", "choices": ["x", "y"], "answer": 1}).aug_answers == ("y", "B. y")
    assert task_of({"question": "?", "choices": ["B", "C"], "answer": 0}).aug_answers == ("A. B",)


def test_a_constant_null_leaves_a_field_out() -> None:
    row = {"id": 1, "query": "?", "answers": '[{"name": "f"}]', "tools": '[{"name": "f", "parameters": {}}]'}
    with pytest.raises(BadTaskError, match="describes functions, and a task's tools are the names of MCP"):
        task_of(row)
    task = task_of(row, fields="tools:=null,answer=answers,scorer:=exact")
    assert (task.tools, task.answer, task.meta["tools"]) == (None, row["answers"], row["tools"])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**VERL, "reward_model": {"ground_truth": {"inputs": [[1]], "outputs": [2], "fn_name": "f"}}},
         "its tests call the function 'f'"),
        ({"question": "?", "choices": ["1", "2"], "answer": 2}, "its answer 2 is not one of its 2 choices"),
        ({"question": "?", "choices": ["1", "2"], "answer": True}, "its answer True is not one of its 2"),
    ],
)  # fmt: skip
def test_rows_that_no_scorer_can_read_are_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadTaskError, match=reason):
        task_of(row)
