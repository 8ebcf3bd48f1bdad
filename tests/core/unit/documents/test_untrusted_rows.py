"""Rows that others write: they name no code, files or images outside their folder, and no device is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agentrl.documents.task_file import ReadResult, TaskSource, read_tasks
from agentrl.errors import TaskFileError

pytestmark = pytest.mark.attack


def read(folder: Path, row: dict[str, Any], *, is_trusted: bool) -> ReadResult:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"id": "a", "query": "q", "answer": "1", "scorer": "math", **row}) + "\n")
    source = TaskSource(file)
    source.is_trusted = is_trusted
    return read_tasks(file, source=source)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for place in (tmp_path, folder):
        Image.new("RGB", (8, 8), "red").save(place / "photo.png")
    return folder


@pytest.mark.parametrize(
    ("row", "outside"),
    [
        ({"scorer": "os:system"}, "os:system"),
        ({"agent_name": "os:system"}, "os:system"),
        ({"scorer": {"math": 0.5, "os:system": 0.5}}, "os:system"),
        ({"agent_cfg_path": "harness.yml"}, "./harness.yml"),
        ({"agent_cfg_path": "/home/user/harness.yml"}, "/home/user/harness.yml"),
    ],
)
def test_only_rows_of_ones_own_name_code_and_files(rows: Path, row: dict[str, Any], outside: str) -> None:
    assert read(rows, row, is_trusted=True).outside == {outside}
    with pytest.raises(TaskFileError, match="others write this data") as refused:
        read(rows, row, is_trusted=False)
    assert outside in str(refused.value)


def test_images_of_others_lie_beside_their_rows(rows: Path) -> None:
    assert read(rows, {"images": ["photo.png"]}, is_trusted=False).tasks[0].images
    absolute = [str(folder / "photo.png") for folder in (rows.parent, rows)]
    for path in ("../photo.png", "a/../../photo.png", *absolute):
        with pytest.raises(TaskFileError, match="outside the folder of the data"):
            read(rows, {"images": [path]}, is_trusted=False)
    assert read(rows, {"images": ["../photo.png"]}, is_trusted=True).tasks[0].images


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "."])
def test_only_files_are_read_as_images(rows: Path, path: str) -> None:
    os.mkfifo(rows / "pipe")
    with pytest.raises(TaskFileError, match="is not a file"):
        read(rows, {"images": [path]}, is_trusted=True)
