"""What the rows of a benchmark make of its exit code, also in the quick form."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "bench"))

from harness import Row, finish

SLOW = Row(what="speed", ours="2 s", baseline="1 s", ratio=0.5, target=1.0)
UNEQUAL = Row(what="gradient norm", ours="1.9", baseline="1.2", ratio=1.6, equal=1e-3)
EQUAL = Row(what="gradient norm", ours="1.2", baseline="1.2", ratio=1.0, equal=1e-3)


@pytest.mark.parametrize(
    ("row", "code", "quick_code"), [(SLOW, 1, 0), (UNEQUAL, 1, 1), (EQUAL, 0, 0)]
)  # fmt: skip
def test_unequal_work_fails_always_and_a_missed_target_not_in_the_quick_form(
    row: Row, code: int, quick_code: int, tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    assert finish("rows", [row, EQUAL], quick=False, file=file) == code
    assert json.loads(file.read_text())[0]["passed"] is (code == 0)
    assert finish("rows", [row, EQUAL], quick=True) == quick_code
