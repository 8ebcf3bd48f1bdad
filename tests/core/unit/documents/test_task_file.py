"""Task files: aliases, types, bad lines, order."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from json_rows import write_rows

from agentrl.base.registry import Registry
from agentrl.documents.task import fingerprint, stored_fingerprint
from agentrl.documents.task_file import FileTasks, TaskFormat, open_task_source, read_tasks
from agentrl.errors import TaskFileError


def write(tmp_path: Path, *items: Any) -> Path:
    return write_rows(tmp_path / "tasks.jsonl", *items)


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


def test_json_list_reports_the_line_of_an_item(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text('[\n {"id": 1, "query": "?"},\n {"id": 2}\n]\n', encoding="utf-8")
    with pytest.raises(TaskFileError, match=r"tasks\.json:3 \(row 2\): query is missing"):
        read_tasks(path)
    assert len(read_tasks(path, skip_bad_lines=True).tasks) == 1
    path.write_text('[{"id": 1, "query": "?"},\n {"id": ', encoding="utf-8")
    with pytest.raises(TaskFileError, match=r"tasks\.json:2: the JSON list"):
        read_tasks(path)


@pytest.mark.parametrize(
    ("before", "between", "behind"), [("", "\n", "\n"), ("[", ",\n", "]"), ("[\n", ",", "]\n")]
)
def test_rows_that_are_lists_stand_on_lines_or_in_a_list(
    tmp_path: Path, before: str, between: str, behind: str
) -> None:
    turns = [{"from": "human", "value": "1+1?"}, {"from": "assistant", "ground_truth": {"value": "2"}}]
    file = tmp_path / "orz.json"
    file.write_text(before + between.join([json.dumps(turns)] * 2) + behind)
    assert [task.answer for task in read_tasks(file).tasks] == ["2", "2"]


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
    for kind, content in (("bzip2", bz2.compress(b"{}")), ("xz", lzma.compress(b"{}"))):
        (tmp_path / "packed").write_bytes(content)
        with pytest.raises(TaskFileError, match=f"packed is packed by {kind}, and only gzip is read"):
            read_tasks(tmp_path / "packed")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON"),
        ('{"id": "x", "query": "?", "answer": NaN}', "not JSON: NaN"),
        ('"text"', "must be a JSON object"),
        ('{"id": "x"}', "query is missing"),
        ('{"id": "x", "text": "?"}', "if it is in text, give --task_fields query=NAME"),
        ('{"id": "x", "query": ""}', "query is ''; it must be text that is not empty"),
        ('{"id": "x", "query": 3}', "query is 3; it must be text"),
        ('{"id": true, "query": "?"}', "id is True; it must be text or a whole number"),
        ('{"id": "x", "query": "?", "tools": "calc"}', "tools is 'calc'; it must be a list"),
        ('{"id": "x", "query": "?", "tools": [1]}', "tools[0] is 1; it must be text"),
        ('{"id": "x", "query": "?", "max_turns": 0}', "max_turns is 0; it must be above 0"),
        ('{"id": "x", "query": "?", "max_turns": "3"}', "max_turns is '3'; it must be a whole number"),
        ('{"id": "x", "query": "?", "query_prompt": "Q"}', "does not hold {query}"),
        ('{"id": "x", "query": "?", "scorer": 1}', "scorer is 1; it must be text"),
        ('{"id": "ok", "query": "again"}', "id 'ok' is used above"),
        ('{"id": "x", "query": "?", "answer": 36893488147419103232}', "answer: the integer 36893488147"),
        ('{"id": "x", "query": "?", "level": %s}' % ("9" * 5000), "level: an integer of 5,000 digits"),
        ('{"id": "x", "query": "?", "answer": -%s}' % ("9" * 5000), "answer: an integer of 5,000 digits"),
        ('{"id": "x", "query": "?", "meta": {"a": [1, 36893488147419103232]}}', "meta.a.1: the integer"),
        ('{"id": "x", "query": "\\ud800?"}', "query: the lone surrogate"),
        ('{"id": "x\\udfff", "query": "?"}', "id: "),
        ('{"id": "x", "query": "?", "meta": {"\\ud800": 1}}', "lone surrogate"),
        ('{"id": "x", "query": "?", "meta": {"a\\u0000b": 1}}', "a NUL character in a key"),
        ('{"id": "x", "query": "?", "meta": %s}' % ("[" * 300 + "]" * 300), "nested more than 90 levels"),
        ('{"id": "x", "query": "?", "meta": %s}' % ("[" * 200_000), "nested more than 90 levels"),
        ('{"id": "x", "query": "?", "meta": %s}' % ('{"a":' * 300 + "1" + "}" * 300), "nested more than 90"),
        ('{"id": "x", "query": "?", "answer": 1e999}', "answer: a number beyond the range"),
        ('{"id": "x", "query": "?", "answer": Infinity}', "not JSON: Infinity"),
        ('{"id": "x", "query": "?", "answer": "4", "answer": "5"}', "answer: given twice"),
        ('{"id": "x", "query": "?", "meta": {"a": 1, "a": 2}}', "meta.a: given twice"),
        ('{"id": "x", "query": "%s"}' % ("a" * 20_000_000), "20,000,025 bytes long, and the limit is"),
        ('{"id": "x", "query": "?", "meta": [%s1]}' % ("1," * 1_000_000), "as a document, and the limit is"),
    ],
    ids=lambda value: value[-30:] if len(value) > 60 else value,
)  # fmt: skip
def test_a_bad_line_is_named_and_nothing_is_loaded(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path, {"id": "ok", "query": "?"}, line, {"id": "after", "query": "?"})
    with pytest.raises(TaskFileError) as caught:
        read_tasks(path)
    assert f"{path}:2: " in caught.value.message
    assert reason in caught.value.message
    assert caught.value.message.startswith("1 of 3 tasks")
    assert len(caught.value.message) < 2000
    result = read_tasks(path, skip_bad_lines=True, shuffle=False)
    assert [task.task_id for task in result.tasks] == ["ok", "after"]
    assert len(result.skipped) == 1


def test_an_integer_of_any_size_is_an_id(tmp_path: Path) -> None:
    assert read_one(tmp_path, {"id": 2**65, "query": "?"}).task_id == str(2**65)
    assert read_one(tmp_path, {"id": 1, "query": "?", "answer": -(2**63)}).answer == -(2**63)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_byte_that_is_not_utf8_makes_its_line_bad_and_no_other(tmp_path: Path, as_list: bool) -> None:
    path = tmp_path / "tasks.jsonl"
    start, between, end = (b"[", b",\n", b"]") if as_list else (b"", b"\n", b"\n")
    items = [b'{"id": 1, "query": "ok"}', b'{"id": 2, "query": "caf\xe9"}', b'{"id": 3, "query": "\xc3\xa9"}']
    path.write_bytes(start + between.join(items) + end)
    with pytest.raises(TaskFileError, match=r"1 of 3 tasks .*\n.*tasks\.jsonl:2( \(row 2\))?: .*not UTF-8"):
        read_tasks(path)
    result = read_tasks(path, skip_bad_lines=True, shuffle=False)
    assert [task.query for task in result.tasks] == ["ok", "é"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32-le"])
def test_utf16_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes('{"id": 1, "query": "?"}\n'.encode(encoding))
    with pytest.raises(TaskFileError, match=f"is not UTF-8: it is {encoding.upper()[:6]}") as caught:
        read_tasks(path)
    assert "iconv -f" in str(caught.value)


@pytest.mark.parametrize(
    "text", ['{"id": 1, "query": "?"}\n{"id": 2, "query": "é"}', '[{"id": 1, "query": "?"}]']
)
def test_gzip_is_read_under_any_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tasks.jsonl"
    packed = gzip.compress(text.encode())
    path.write_bytes(packed)
    tasks = read_tasks(path, shuffle=False).tasks
    assert tasks[0].query == "?"
    assert len(tasks) == text.count("id")
    path.write_bytes(packed[:-9])
    with pytest.raises(TaskFileError, match="cannot be read: "):
        read_tasks(path)


def test_a_pipe_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = subprocess.Popen(["sh", "-c", f'echo \'{{"id": 1, "query": "?"}}\' > {path}'])
    try:
        assert [task.task_id for task in read_tasks(path).tasks] == ["1"]
    finally:
        assert writer.wait(timeout=60) == 0


def test_items_of_a_list_that_cross_the_parts_it_is_read_in(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    items = [{"id": number, "query": f"é{number}" * 3000} for number in range(60)]
    path.write_text(json.dumps(items, ensure_ascii=False, indent=1), encoding="utf-8")
    tasks = read_tasks(path, shuffle=False).tasks
    assert [(task.task_id, task.query) for task in tasks] == [(str(i["id"]), i["query"]) for i in items]
    path.write_text(json.dumps(items, ensure_ascii=False)[:-1] + "] x", encoding="utf-8")
    with pytest.raises(TaskFileError, match=r"tasks\.json:1: .* something follows"):
        read_tasks(path)


def test_a_file_that_changes_while_it_is_loaded_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, *({"id": number, "query": "?"} for number in range(3)))
    tasks = read_tasks(path, shuffle=False).tasks
    path.write_text("x" * 100, encoding="utf-8")
    with pytest.raises(TaskFileError, match="changed while it was loaded"):
        list(tasks)


def test_ids_and_fingerprints_are_known_without_the_file(tmp_path: Path) -> None:
    items = [{"id": str(n), "query": "?", "level": n, "aug_answers": [n, None]} for n in range(9)]
    tasks = read_tasks(write(tmp_path, *items)).tasks
    assert isinstance(tasks, FileTasks)
    read = [(task.id, fingerprint(task)) for task in tasks]
    stored = [stored_fingerprint(task.to_document(), len(task.slots)) for task in tasks]
    write(tmp_path, {"id": "another"})
    assert [tasks.fingerprint(order) for order in range(9)] == read
    assert [own for _, own in read] == stored
    assert len(set(stored)) == 9


def test_misspelt_fields_are_warned_of(tmp_path: Path) -> None:
    items = [{"id": number, "query": "?", "anwser": 1, "Scorer": "exact", "level": 3} for number in range(2)]
    result = read_tasks(write(tmp_path, *items))
    assert result.tasks[0].meta == {"anwser": 1, "Scorer": "exact", "level": 3}
    _, first, second = result.warnings
    assert "tasks.jsonl:1: " in first
    assert "'anwser'" in first
    assert "did you mean 'answer'? (2 tasks have it)" in first
    assert "did you mean 'scorer'?" in second


def test_tasks_that_are_judged_by_the_question_alone_are_named(tmp_path: Path) -> None:
    items = [
        {"id": 1, "query": "?", "answer": 1}, {"id": 2, "query": "?"}, {"id": 3, "query": "?"},
        {"id": 4, "query": "?", "scorer": {"exact": 0.5, "format": 0.5}},
        {"id": 5, "query": "?", "scorer": "rubric"}, {"id": 8, "query": "?", "rubric": ["is polite"]},
        {"id": 6, "query": "?", "environment": "number_game"}, {"id": 7, "query": "?", "aug_answers": ["a"]},
    ]  # fmt: skip
    (warning,) = read_tasks(write(tmp_path, *items)).warnings
    assert "tasks.jsonl:2: no answer, so the scorer agentcpm (the default) lets the judge" in warning
    assert "decide by the question alone (2 tasks)" in warning


_MEASURE = """
import json, resource, sys
from agentrl.documents.task_file import read_tasks

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

before = most()
result = read_tasks(sys.argv[1])
count = sum(len(task.query) > 1000 for task in result.tasks)
print(json.dumps([count, most() - before]))
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, *({"id": number, "query": f"{number} " * 1800} for number in range(10_000)))
    assert path.stat().st_size > 80_000_000
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)], capture_output=True, text=True, timeout=300, check=True
    )
    count, megabytes = json.loads(done.stdout)
    assert count == 10_000
    assert megabytes < 60


def test_a_source_of_a_format_that_is_not_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "agentrl.documents.task_file.TASK_FORMATS", Registry[TaskFormat]("task format", group="agentrl.none")
    )
    (tmp_path / "by_its_bytes").write_bytes(b"PAR1 and more")
    for source in ("tasks.parquet", "tasks.csv.gz", "hf://openai/gsm8k", "", "by_its_bytes"):
        where = source if "://" in source else str(tmp_path / source)
        with pytest.raises(TaskFileError, match=r"agentrl\.worlds, which reads others, is not installed"):
            open_task_source(where, "train")
    for name in ("tasks.jsonl", "tasks"):
        file = write_rows(tmp_path / name, {"id": "a", "query": "?"})
        assert [item.value["id"] for item in open_task_source(str(file), "train").items()] == ["a"]


def test_formats_are_asked_in_the_order_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    formats: Registry[TaskFormat] = Registry("task format", group="agentrl.none")
    monkeypatch.setattr("agentrl.documents.task_file.TASK_FORMATS", formats)
    asked: list[tuple[str, str]] = []

    def asked_as(name: str) -> TaskFormat:
        return lambda text, wanted: asked.append((name, wanted))

    for name in ("second", "first"):
        formats.add(asked_as(name), name)
    with pytest.raises(TaskFileError, match="cannot be read"):
        open_task_source("missing.jsonl", "eval")
    assert asked == [("first", "eval"), ("second", "eval")]
