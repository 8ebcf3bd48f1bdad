"""``agentrl tasks check``: what it counts, what it finds, and its exit code."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_rows import write_rows

from agentrl.cli.main import main
from agentrl.cli.tasks import Overlaps, read_checked, report
from agentrl.config.schema import TaskConfig
from agentrl.scoring.answers import normalized_text


def write(path: Path, *rows: dict[str, Any]) -> str:
    return str(write_rows(path, *rows))


Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Run ``agentrl tasks check``; return its exit code and what it prints."""

    def run(*words: str) -> tuple[int, str]:
        code = main(["tasks", "check", *words])
        return code, "".join(capsys.readouterr())

    return run


def row(question: str, number: int, **more: Any) -> dict[str, Any]:
    return {"question": question, "answer": f"so\n#### {number}", **more}


def test_a_source_that_loads(tmp_path: Path, check: Check) -> None:
    rows = [row(f"How many are {number} and 1?", number + 1) for number in range(30)]
    train = write(
        tmp_path / "train.jsonl",
        *rows, row("How many are 3 and 1?", 4, level=2), row("how  many are 4, and 1", 5),
        row("How many are 4 - 1?", 3), row("How many are 4 + 1?", 5),
    )  # fmt: skip
    held_out = write(tmp_path / "test.jsonl", row("HOW many are 7 and 1?", 8), row("And 8?", 8))
    code, printed = check(train, "--eval_file", held_out, "--json")
    found = json.loads(printed)
    assert code == 0
    assert (found["rows"], found["tasks"], found["bad"], found["loads"]) == (34, 34, [], True)
    assert found["presets"] == {"gsm8k": 34}
    assert found["names"]["scorer"] == {"math": 34}
    assert found["fields"][2] == {"name": "level", "kinds": {"a number": 1}, "filled": 1 / 34}
    assert found["duplicates"] == {"same": 1, "near": 1, "examples": [["3", "30"], ["4", "31"]]}
    no_near: dict[str, Any] = {"tasks": 0, "examples": []}
    pairs = [{"train": "7", "eval": "0"}]
    assert found["leakage"] == {"tasks": 1, "of": 2, "examples": pairs, "near": no_near}
    assert found["leaks"] == {"tasks": 0, "examples": []}
    assert found["sizes"]["characters"]["max"] == len("How many are 10 and 1?")
    assert found["eval"]["tasks"] == 2
    code, printed = check(train, "--eval_file", held_out)
    assert code == 0
    assert "train.jsonl: 34 tasks, 0 bad rows" in printed
    assert "read as gsm8k: query ← question" in printed
    assert "duplicates    1 with the same question, 1 with nearly the same" in printed
    assert "leakage       1 of 2 eval tasks ask a question of the training tasks" in printed
    assert "train 7 = eval 0" in printed
    assert printed.endswith("→ this loads\n")


def test_what_would_stop_a_load_gives_exit_code_1(tmp_path: Path, check: Check) -> None:
    bad = {"id": "x", "query": "?", "answer": "", "scorer": "math", "answer_schema": "####"}
    good = {"id": "y", "query": "?", "answer": "x+1", "scorer": "exact"}
    source = write(tmp_path / "tasks.jsonl", good, bad, {"id": "y", "query": "?"})
    code, printed = check(source)
    assert code == 1
    assert "1 tasks, 2 bad rows" in printed
    assert f"bad row       {source}:2: scorer math cannot read the answer" in printed
    assert f"{source}:3: id 'y' is used above" in printed
    assert printed.endswith("→ this would not load\n")
    unknown = {**good, "id": "z", "scorer": "exakt"}
    code, printed = check(write(tmp_path / "tasks.jsonl", good, unknown))
    assert (code, "tasks.jsonl:2: unknown scorer 'exakt'" in printed) == (1, True)
    code, printed = check(source, "--task_fields", "answer=nope")
    assert (code, "no row has 'nope' of --task_fields" in printed) == (2, True)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"problem": "p", "answer": "…"}, "math-verify cannot parse 1 of 1 answers examined"),
        ({"query": "In \\boxed{}?", "answer": "4", "scorer": "exact"}, "answer_schema answer reads nothing"),
    ],
)
def test_what_may_be_wrong_is_a_warning(row: dict[str, Any], said: str, tmp_path: Path, check: Check) -> None:
    code, printed = check(write(tmp_path / "tasks.jsonl", row))
    assert (code, said in printed) == (0, True)


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path, check: Check) -> None:
    source = write(tmp_path / "tasks.jsonl", {"id": 1, "query": "?", "answer": "4"})
    code, printed = check(source, "--import_modules", "no_such_module")
    assert code == 2
    assert "the module 'no_such_module' (--import_modules) cannot be imported" in printed


def test_a_question_is_the_same_in_other_case_spaces_and_punctuation() -> None:
    assert normalized_text(" What is 2+2 ? ") == normalized_text("what\nis 2+2")
    assert normalized_text("2 - 2") != normalized_text("2 + 2")


def test_a_prompt_that_gives_the_answer_is_named_and_loads(tmp_path: Path, check: Check) -> None:
    example = [
        {"role": "user", "content": "What is the tallest mountain?"},
        {"role": "assistant", "content": "K2"},
    ]
    rows = [
        {"query": "What is 4 + 4? <answer>8</answer>", "answer": "8"},
        {"query": "The capital of Peru is Lima. What is it?", "answer": "Lima"},  # as a choice would be
        {"query": "Who leads? Ada Lovelace leads.", "answer": ["Lovelace, Ada", "ADA  Lovelace!"]},
        {"query": "Is it so, yes or no?", "answer": "yes"},
        {"query": "What is the tallest mountain?", "answer": "K2", "messages": example},
        {"query": "Which lake?", "answer": "4", "messages": example},
        {"query": "Which river?", "answer": "Mississippi River",
         "messages": [{"role": "system", "content": "It is the mississippi river."}]},
    ]  # fmt: skip
    source = write(
        tmp_path / "tasks.jsonl", *({"id": n, "scorer": "exact", **row} for n, row in enumerate(rows))
    )
    code, printed = check(source, "--json")
    found = json.loads(printed)["leaks"]
    assert (code, found["tasks"]) == (0, 4)
    assert [(item["task"], item["in"]) for item in found["examples"]] == [
        ("0", "the question"), ("2", "the question"), ("4", "message 1"), ("6", "the system prompt"),
    ]  # fmt: skip
    _, printed = check(source)
    assert "answers       4 tasks give theirs in the prompt" in printed
    assert "4, in message 1" in printed


def test_a_question_that_shares_most_of_its_words_is_near(tmp_path: Path, check: Check) -> None:
    told = "Answer the question below in one line and write the result between two tags:"
    held = "A train leaves Lyon at nine and reaches Paris three hours later; how fast was it on the way?"
    train = [
        f"{told} Which town lies {number} miles to the north of the river?" for number in range(40)
    ] + [f"{told} {held.replace('Lyon', 'Nice')}"]  # fmt: skip
    asked = [f"{told} {held}", *(f"{told} Who wrote book {number}?" for number in range(20))]
    files = [
        write(tmp_path / name, *({"id": n, "query": query, "answer": "4"} for n, query in enumerate(rows)))
        for name, rows in (("train.jsonl", train), ("test.jsonl", asked))
    ]
    code, printed = check(files[0], "--eval_file", files[1], "--json")
    found = json.loads(printed)["leakage"]
    assert (code, found["tasks"]) == (0, 0)
    assert found["near"] == {"tasks": 1, "examples": [{"train": "40", "eval": "0"}]}
    assert "train 40 ≈ eval 0" in check(files[0], "--eval_file", files[1])[1]


def test_a_question_without_spaces_is_near_by_its_characters(tmp_path: Path, check: Check) -> None:
    question = "小明有三个苹果，小红又送给他五个橘子，请问现在小明一共有多少个水果？"
    train, *held = [
        write(tmp_path / f"{n}.jsonl", {"id": n, "query": query, "answer": "8"})
        for n, query in enumerate((f"题目：{question}请作答。", question, "现在小明一共有多少个水果？"))
    ]
    near = [json.loads(check(train, "--eval_file", each, "--json")[1])["leakage"]["near"] for each in held]
    assert near == [{"tasks": 1, "examples": [{"train": "0", "eval": "1"}]}, {"tasks": 0, "examples": []}]


def test_the_search_for_near_questions_is_linear() -> None:
    overlaps = Overlaps()
    words = [f"w{number}" for number in range(200)]
    for number in range(500):
        overlaps.add(number, " ".join([*words, str(number)]))  # all but the last runs are common
    began = time.perf_counter()
    for number in range(500):
        overlaps.look(number, " ".join([*words, "other"]))
    assert overlaps.found == {}
    assert time.perf_counter() - began < 5


GRAPH = """
from agentrl import agent, scorer

@agent("names_test_thinker")
async def think(rollout):
    ...

@scorer("names_test_scorer")
def score(context):
    return 1.0
"""


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("imports", [True, False])
def test_a_registered_name_is_known_by_its_module_and_not_by_the_order_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Check, in_order: bool, imports: bool
) -> None:
    module = f"names_test_graph_{in_order}_{imports}".lower()
    agent, own_scorer = f"{module}_thinker", f"{module}_scorer"
    (tmp_path / f"{module}.py").write_text(
        GRAPH.replace("names_test_thinker", agent).replace("names_test_scorer", own_scorer)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [
        {"id": 1, "query": "?", "answer": "4", "scorer": f"{module}:score", "agent_name": f"{module}:think"},
        {"id": 2, "query": "?!", "answer": "4", "scorer": "exact", "agent_name": agent},
        {"id": 3, "query": "!", "answer": "4", "scorer": own_scorer},
    ]  # fmt: skip
    source = write(tmp_path / "tasks.jsonl", *(rows if in_order else reversed(rows)))
    flags = ["--import_modules", module] if imports else []
    code, printed = check(source, *flags)
    assert code == (0 if imports else 1)
    for line in () if imports else (f"unknown agent '{agent}'", f"unknown scorer '{own_scorer}'"):
        assert line in printed
    assert f"not checked   whether right answers score 1 with {module}:score" in printed


def test_rows_of_a_json_list_on_one_line_are_named(tmp_path: Path, check: Check) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([{"id": 1, "query": "?", "answer": "4"}, {"id": 2}, {"id": 3}]))
    code, printed = check(str(path))
    assert code == 1
    assert f"{path}:1 (row 2): query is missing" in printed
    assert f"{path}:1 (row 3): query is missing" in printed


async def test_characters_and_tokens_are_those_of_the_question_and_its_few_shot_messages(
    tmp_path: Path,
) -> None:
    shown = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    source = write(
        tmp_path / "tasks.jsonl",
        {"id": "a", "query": "2+2?", "answer": "4", "scorer": "exact", "messages": shown},
        {"id": "b", "query": "2+2+2?", "answer": "6", "scorer": "exact"},
    )  # fmt: skip
    checked = await read_checked(source, "train", TaskConfig())
    sizes = report(source, checked, lambda texts: [len(text) for text in texts])["sizes"]
    assert sizes["characters"]["max"] == sizes["tokens"]["max"] == len("1+1?22+2?")
    assert sizes["characters"]["longest"] == sizes["tokens"]["longest"] == "a"
