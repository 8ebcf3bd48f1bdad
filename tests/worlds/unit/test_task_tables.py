"""Task files of other kinds: the same rows in any of them are the same tasks, and bad rows are named."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest
from json_rows import write_rows
from PIL import Image

from agentrl.documents.task_file import ReadResult
from agentrl.errors import TaskFileError
from agentrl.evaluation.evaluate import digest_tasks
from agentrl.rollout.load_tasks import read_task_source

SUFFIX = ' Let\'s think step by step and output the final answer after "####".'


def verl_rows(count: int, split: str = "train") -> list[dict[str, Any]]:
    """Rows of GSM8K as verl's examples/data_preprocess/gsm8k.py writes them."""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Ann has {number} apples and buys 3. How many?{SUFFIX}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 3)},
            "extra_info": {
                "split": split, "index": number, "answer": f"{number}+3={number + 3}\n#### {number + 3}",
                "question": f"Ann has {number} apples and buys 3. How many?",
            },
        }
        for number in range(count)
    ]  # fmt: skip


ALIASES = "\n".join([
    "---", "configs:", "- config_name: default", "  data_files:", "  - split: train", "    path:",
    "    - &a [x, x, x, x, x, x, x, x, x, x]",
    *(f"    - &{chr(98 + at)} [{', '.join([f'*{chr(97 + at)}'] * 10)}]" for at in range(12)), "---", "",
])  # fmt: skip
"""Twelve lines whose text would be 10 TB."""
PLAIN = [
    {"id": "a", "query": "Ünï, \"quoted\"\nand 漢字?", "answer": "007", "scorer": "exact", "max_turns": 2},
    {"id": "b", "query": "1.10?", "answer": "1.10", "scorer": "exact", "tools": ["calc", "web"]},
    {"id": "c", "query": "?", "answer": "x", "scorer": "f1", "meta": {"level": 3}},
]  # fmt: skip


def write(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Path]:
    """Write the rows as each kind of file."""
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    write_rows(folder / "rows.jsonl", *rows)
    (folder / "rows.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=2)
    pyarrow.feather.write_feather(table, folder / "rows.feather")
    saved = folder / "saved" / "train"
    saved.mkdir(parents=True)
    for number, part in enumerate((table.slice(0, 2), table.slice(2))):
        with pyarrow.ipc.new_stream(str(saved / f"data-0000{number}-of-00002.arrow"), table.schema) as stream:
            stream.write_table(part)
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (saved / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    return {kind: folder / f"rows.{kind}" for kind in ("jsonl", "json", "parquet", "feather")} | {
        "saved": folder / "saved", "split": saved,
    }  # fmt: skip


def read(path: Path | str, **options: Any) -> ReadResult:
    return read_task_source(path, shuffle=False, **options)


@pytest.mark.parametrize("rows", [verl_rows(600), PLAIN], ids=["verl", "plain"])
def test_every_kind_of_file_gives_the_same_tasks(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    paths = write(tmp_path, rows)
    results = {kind: read(path) for kind, path in paths.items()}
    table, lines = ([task.query for task in results[kind].tasks] for kind in ("parquet", "jsonl"))
    assert table == lines
    digests = {kind: digest_tasks(result.tasks) for kind, result in results.items()}
    assert len(set(digests.values())) == 1, digests
    assert {len(result.tasks) for result in results.values()} == {len(rows)}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
def test_csv_gives_the_same_tasks_too(tmp_path: Path, suffix: str) -> None:
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in PLAIN for name in row))
    writer = csv.DictWriter(text, names, delimiter="\t" if suffix == ".tsv" else ",")
    writer.writeheader()
    for row in PLAIN:
        writer.writerow({
            key: json.dumps(value) if isinstance(value, (list, dict)) else value for key, value in row.items()
        })  # fmt: skip
    content = text.getvalue().encode("utf-8-sig")
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    expected = read(write(tmp_path, PLAIN)["jsonl"]).tasks
    assert digest_tasks(read(path).tasks) == digest_tasks(expected)


def test_bad_rows_are_named_by_file_and_row(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("id,query,answer\na,?,1\nb,?\nc,,1\nd,?,1\n")
    with pytest.raises(TaskFileError) as caught:
        read(rows)
    assert f"{rows}:2: 2 cells, and the header has 3" in caught.value.message
    assert f"{rows}:3: query is missing" in caught.value.message
    assert [task.task_id for task in read(rows, skip_bad_lines=True).tasks] == ["a", "d"]

    folder = tmp_path / "parts"
    folder.mkdir()
    for name, numbers in (("0", [1.0, 2.0]), ("1", [3.0, float("nan")])):
        ids = [f"{name}{at}" for at in numbers]
        table = pyarrow.table({"id": ids, "query": ["?", "?"], "number": numbers})
        pyarrow.parquet.write_table(table, folder / f"part-{name}.parquet")
    with pytest.raises(TaskFileError, match=r"part-1.parquet:2: number: not JSON: NaN") as caught:
        read(folder)
    assert "1 of 4 tasks" in caught.value.message
    table = table.append_column("when", pyarrow.array([1, 1000], pyarrow.time64("ns")))
    pyarrow.parquet.write_table(table, folder / "part-1.parquet")
    with pytest.raises(TaskFileError, match=r"part-1.parquet:1: when: its value of type time64\[ns\] cannot"):
        read(folder)


@pytest.mark.parametrize("pandas", [True, False])
def test_times_are_the_same_with_and_without_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pandas: bool
) -> None:
    """pyarrow returns pandas's types for nanoseconds where pandas is installed."""
    if pandas:
        pytest.importorskip("pandas")
    else:
        monkeypatch.setitem(sys.modules, "pandas", None)
    second = 1_000_000_000
    columns = {
        "at": pyarrow.array([second], pyarrow.timestamp("ns")),
        "lasts": pyarrow.array([second // 2], pyarrow.duration("ns")),
        "ends": pyarrow.array(
            [{"x": [second]}], pyarrow.struct([("x", pyarrow.list_(pyarrow.time64("ns")))])
        ),
        "zone": pyarrow.array([second], pyarrow.timestamp("ns", "UTC")),
        "map": pyarrow.array([[("a", second)]], pyarrow.map_(pyarrow.string(), pyarrow.timestamp("ns"))),
    }
    table = pyarrow.table({"id": ["1"], "query": ["?"], "answer": ["1"], **columns})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (task,) = read(tmp_path / "rows.parquet").tasks
    assert task.meta == {
        "at": "1970-01-01T00:00:01", "lasts": 0.5, "ends": {"x": ["00:00:01"]},
        "zone": "1970-01-01T00:00:01+00:00", "map": {"a": "1970-01-01T00:00:01"},
    }  # fmt: skip


def test_json_in_a_cell_is_checked_as_that_of_a_line(tmp_path: Path) -> None:
    """NaN and keys that come twice have no place in a document."""
    rows = tmp_path / "rows.csv"
    rows.write_text('id,query,meta\na,?,"{""x"": NaN}"\nb,?,"{""x"": 1,\n""x"": 2}"\nc,?,"{""x"": 3}"\n')
    with pytest.raises(TaskFileError) as caught:
        read(rows)
    assert f"{rows}:1: meta.x: not JSON: NaN" in caught.value.message
    assert f"{rows}:2: meta.x: given twice" in caught.value.message
    assert read(rows, skip_bad_lines=True).tasks[0].meta == {"x": 3}


def test_values_that_json_lacks_are_converted(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (2, 2)).save(picture, "PNG")
    table = pyarrow.table({
        "id": ["a"], "query": ["<image>?"], "answer": [decimal.Decimal("1.10")],
        "when": [datetime.datetime(2026, 1, 2, 3, 4, 5)], "took": [datetime.timedelta(seconds=1.5)],
        "raw_text": [b"text"], "none": pyarrow.array([None], pyarrow.string()),
        "pairs": pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "word": pyarrow.array(["x"]).dictionary_encode(),
        "images": [[{"bytes": picture.getvalue(), "path": None}]],
    })  # fmt: skip
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, path)
    result = read(path)
    task = result.tasks[0]
    assert (task.answer, len(task.images), len(list(result.images()))) == ("1.10", 1, 1)
    assert task.meta == {
        "when": "2026-01-02T03:04:05", "took": 1.5, "raw_text": "text", "pairs": {"a": 1}, "word": "x",
    }  # fmt: skip
    pyarrow.parquet.write_table(table.set_column(5, "raw_text", [[b"\xff\xfe"]]), path)
    with pytest.raises(TaskFileError, match=r"rows\.parquet:1: raw_text: 2 bytes that are not UTF-8 text"):
        read(path)


def test_a_folder_of_data_files_has_splits(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        path = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(verl_rows(count, split)), path)
    assert len(read(tmp_path).tasks) == 3
    assert len(read(tmp_path, split="eval").tasks) == 2
    assert len(read(f"{tmp_path}:test").tasks) == 2
    with pytest.raises(TaskFileError, match="has no split 'dev'; it has test, train"):
        read(f"{tmp_path}:dev")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: held_out\n    path: data/test-*\n---\n"
    )
    assert len(read(f"{tmp_path}:held_out").tasks) == 2
    (tmp_path / "data" / "train.jsonl").write_text("{}")
    (tmp_path / "README.md").unlink()
    with pytest.raises(TaskFileError, match="files of several kinds"):
        read(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(TaskFileError, match="no Parquet, Arrow, CSV or JSON files"):
        read(empty)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.csv"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b'id,query\n"a' if name == "rows.csv" else b"PAR1 and nothing else")
    with pytest.raises(TaskFileError, match=f"the task file .*{name} cannot be read"):
        read(path)
    path.write_text("id,id\n1,2\n")
    if name == "rows.csv":
        with pytest.raises(TaskFileError, match="has two columns 'id'"):
            read(path)


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"scorer": "math", "answer_schema": "####", "answer": "x\n+1"}, "answer_schema #### reads 'x'"),
        ({"scorer": "math", "answer_schema": "boxed", "answer": "\\frac{1}{2"}, "answer_schema boxed reads"),
        ({"scorer": "exact", "answer": " "}, "scorer exact cannot read the answer: it is empty"),
        ({"scorer": "exact", "answer": {"a": 1}}, "it is an object, and text or a number is compared"),
        ({"scorer": "f1"}, "scorer f1 compares with an answer, and the task has none"),
        ({"scorer": {"exact": 0.5, "format": 0.5}, "answer": "</answer>"}, "answer_schema answer reads"),
    ],
)
def test_an_answer_that_its_scorer_cannot_read_is_a_bad_line(
    tmp_path: Path, task: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "tasks.jsonl"
    good = [
        {"id": 1, "query": "?", "answer": [["x"], "A"], "scorer": "exact"},
        {"id": 2, "query": "?", "answer": "$72", "scorer": "math", "answer_schema": "####"},
        {"id": 3, "query": "?", "answer": 1.5, "scorer": "math", "answer_schema": "boxed"},
        {"id": 4, "query": "?", "scorer": "f1", "answer": "The"},
        {"id": 5, "query": "?"},
    ]
    write_rows(path, *good, {"id": 9, "query": "?", **task})
    with pytest.raises(TaskFileError) as caught:
        read(path)
    assert "1 of 6 tasks" in caught.value.message
    assert f"{path}:6: " in caught.value.message
    assert reason in caught.value.message


def test_narrow_floats_are_read_as_json_has_them(tmp_path: Path) -> None:
    narrow, half = pyarrow.float32(), pyarrow.float16()
    values = [0.1, 2.5, -1e-7, 16777217.0]
    columns = {
        "query": pyarrow.array(["?"] * 4),
        "answer": pyarrow.array(values, narrow),
        "half": pyarrow.array(np.array([0.1, 2.5, -0.3, 7], np.float16), half),
        "list": pyarrow.array([[value] for value in values], pyarrow.list_(narrow)),
        "struct": pyarrow.array([{"a": {"b": 0.1}}, {"a": None}, None, {"a": {"b": None}}],
                                pyarrow.struct({"a": pyarrow.struct({"b": narrow})})),
        "map": pyarrow.array([[("k", 0.1)], None, [], [("k", None)]], pyarrow.map_(pyarrow.string(), narrow)),
        "fixed": pyarrow.array([[0.1, 0.2]] * 4, pyarrow.list_(narrow, 2)),
        "encoded": pyarrow.array(["a", "b", "a", "b"]).dictionary_encode(),
        "wide": pyarrow.array([0.10000000149011612] * 4),
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    tasks = read(tmp_path / "rows.parquet").tasks
    assert [task.answer for task in tasks] == [0.1, 2.5, -1e-07, 16777216.0]
    first = tasks[0].meta
    assert (first["half"], first["list"], first["struct"]) == (0.1, [0.1], {"a": {"b": 0.1}})
    assert (first["map"], first["fixed"], first["wide"]) == ({"k": 0.1}, [0.1, 0.2], 0.10000000149011612)
    assert tasks[3].meta["encoded"] == "b"


@pytest.mark.attack
@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv.gz", "rows.parquet"])
def test_a_file_that_unpacks_to_far_more_than_it_is_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.documents.task_file._UNPACKED_BYTES", 2**20)
    if name.endswith(".parquet"):
        table = pyarrow.table({"query": pyarrow.array(["x" * 2**16] * 1000)})
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(gzip.compress(b"query\n" + b" " * (64 * 2**20)))
    with pytest.raises(TaskFileError, match="unpacks to more than"):
        read(tmp_path / name)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("state.json", '{"_data_files": [{"filename": "../rows.jsonl"}]}', "which is nothing beside it"),
        ("state.json", '{"_data_files": [{"filename": "/etc/passwd"}]}', "which is nothing beside it"),
        ("state.json", '{"_data_files": [5]}', "which is nothing beside it"),
        ("state.json", "[" * 100_000, "cannot be read"),
        ("dataset_dict.json", '{"splits": ["."]}', "which is nothing beside it"),
        ("dataset_dict.json", '{"splits": [{"a": 1}]}', "which is nothing beside it"),
        ("dataset_dict.json", '{"splits": 3}', "has no split 'train'"),
        ("README.md", "---\n" + "[" * 5000 + "\n---\n", None),
        ("README.md", "\xff\xfe", None),
        ("README.md", ALIASES, None),
    ],
)
def test_a_hostile_folder_is_refused_or_read(
    tmp_path: Path, file: str, text: str, problem: str | None
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"query": "?", "answer": "1"}')
    (folder / file).write_text(text, encoding="latin-1")
    if problem is None:
        assert len(read(folder).tasks) == 1
        return
    with pytest.raises(TaskFileError, match=problem):
        read(folder)
