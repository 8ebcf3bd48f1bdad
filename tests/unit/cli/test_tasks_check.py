"""``agentrl tasks check``: what it counts, what it finds, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.rollout.check_tasks import normalized_query


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def row(question: str, number: int, **more: Any) -> dict[str, Any]:
    return {"question": question, "answer": f"so\n#### {number}", **more}


def test_a_source_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(f"How many are {number} and 1?", number + 1) for number in range(30)]
    train = write(
        tmp_path / "train.jsonl",
        *rows, row("How many are 3 and 1?", 4, level=2), row("how  many are 4, and 1", 5),
        row("How many are 4 - 1?", 3), row("How many are 4 + 1?", 5),
    )  # fmt: skip
    held_out = write(tmp_path / "test.jsonl", row("HOW many are 7 and 1?", 8), row("And 8?", 8))
    assert main(["tasks", "check", train, "--eval_file", held_out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["tasks"], found["bad"], found["loads"]) == (34, 34, [], True)
    assert found["presets"] == {"gsm8k": 34}
    assert found["names"]["scorer"] == {"math": 34}
    assert found["fields"][2] == {"name": "level", "kinds": {"a number": 1}, "filled": 1 / 34}
    assert found["duplicates"] == {"same": 1, "near": 1, "examples": [["3", "30"], ["4", "31"]]}
    assert found["leakage"] == {"tasks": 1, "of": 2, "examples": [{"train": "7", "eval": "0"}]}
    assert found["sizes"]["characters"]["max"] == len("How many are 10 and 1?")
    assert found["eval"]["tasks"] == 2
    assert main(["tasks", "check", train, "--eval_file", held_out]) == 0
    printed = capsys.readouterr().out
    assert "train.jsonl: 34 tasks, 0 bad rows" in printed
    assert "read as gsm8k: query ← question" in printed
    assert "duplicates    1 with the same question, 1 with nearly the same" in printed
    assert "leakage       1 of 2 eval tasks ask a question of the training tasks" in printed
    assert "train 7 = eval 0" in printed
    assert printed.endswith("→ this loads\n")


def test_what_would_stop_a_load_gives_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"id": "x", "query": "?", "answer": "", "scorer": "math", "answer_schema": "####"}
    good = {"id": "y", "query": "?", "answer": "x+1", "scorer": "exact"}
    source = write(tmp_path / "tasks.jsonl", good, bad, {"id": "y", "query": "?"})
    assert main(["tasks", "check", source]) == 1
    printed = capsys.readouterr().out
    assert "1 tasks, 2 bad rows" in printed
    assert f"bad row       {source}:2: scorer math cannot read the answer" in printed
    assert f"{source}:3: id 'y' is used above" in printed
    assert printed.endswith("→ this would not load\n")
    unknown = {**good, "id": "z", "scorer": "exakt"}
    assert main(["tasks", "check", write(tmp_path / "tasks.jsonl", good, unknown)]) == 1
    assert "tasks.jsonl:2: unknown scorer 'exakt'" in capsys.readouterr().out
    assert main(["tasks", "check", source, "--task_fields", "answer=nope"]) == 2
    assert "no row has 'nope' of --task_fields" in capsys.readouterr().err


def test_answers_that_math_verify_cannot_parse_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"problem": f"p{number}", "answer": answer} for number, answer in enumerate(("\\frac{1}{2}", "…"))
    ]
    assert main(["tasks", "check", write(tmp_path / "tasks.jsonl", *rows)]) == 0
    assert "math-verify cannot parse 1 of 2 answers examined" in capsys.readouterr().out


def test_a_question_is_the_same_in_other_case_spaces_and_punctuation() -> None:
    assert normalized_query(" What is 2+2 ? ") == normalized_query("what\nis 2+2")
    assert normalized_query("2 - 2") != normalized_query("2 + 2")


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    in_order: bool,
    imports: bool,
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
    assert main(["tasks", "check", source, *flags]) == (0 if imports else 1)
    printed = capsys.readouterr().out
    for line in () if imports else (f"unknown agent '{agent}'", f"unknown scorer '{own_scorer}'"):
        assert line in printed
    assert f"not checked   whether right answers score 1 with {module}:score" in printed


def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "tasks.jsonl", {"id": 1, "query": "?", "answer": "4"})
    assert main(["tasks", "check", source, "--import_modules", "no_such_module"]) == 2
    assert "the module 'no_such_module' (--import_modules) cannot be imported" in capsys.readouterr().err


def test_rows_of_a_json_list_on_one_line_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([{"id": 1, "query": "?", "answer": "4"}, {"id": 2}, {"id": 3}]))
    assert main(["tasks", "check", str(path)]) == 1
    printed = capsys.readouterr().out
    assert f"{path}:1 (row 2): query is missing" in printed
    assert f"{path}:1 (row 3): query is missing" in printed


def test_a_prompt_and_a_schema_that_do_not_fit_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"id": 1, "query": "Put it in \\boxed{}.", "answer": "4", "scorer": "exact"}
    assert main(["tasks", "check", write(tmp_path / "tasks.jsonl", row)]) == 0
    assert "of which answer_schema answer reads nothing" in capsys.readouterr().out
