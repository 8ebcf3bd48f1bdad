"""Log records that name something withdrawn are removed from the run's own files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.lab.retract import remove_lines

RECORD = "train/0/a/0/1"


@pytest.mark.parametrize(
    ("name", "writer", "removed"),
    [
        ("math_train_h-1.log", "math/train-h-1", 1),
        ("math_train_h-1.log.2", "math/train-h-1", 1),
        ("math_2_train_h-1.log", "math_2/train-h-1", 0),
        ("math_local_h-1.log", None, 1),  # what an engine prints has another form
        ("maths_train_h-1.log", "maths/train-h-1", 0),
        ("math_train_h-1.txt", "math/train-h-1", 0),
    ],
)
def test_a_file_of_a_run_with_a_longer_name_stays(
    tmp_path: Path, name: str, writer: str | None, removed: int
) -> None:
    begin = "" if writer is None else f"2026-11-29 01:00:00 INFO    {writer}  "
    lines = [f"{begin}scored {RECORD}\n", f"{begin}scored {RECORD}0\n"]
    (tmp_path / name).write_text("".join(lines))
    assert remove_lines(tmp_path, "math", [RECORD]) == removed
    assert (tmp_path / name).read_text() == "".join(lines[removed:])
