"""``scripts/bench/gpu_check.py --fake``: the check of a GPU without one, and the page that it writes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parents[3] / "scripts" / "bench" / "gpu_check.py"


def check(tmp_path: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """The exit code of a fake check, and its page."""
    page = tmp_path / "pages" / "gpu_check.md"
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "--fake", "--out", str(page), *arguments],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert page.is_file(), ended.stderr
    return ended.returncode, page.read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the device guard with")
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="this build of torch has a device guard of its own"
)
def test_a_page_has_memory_beside_the_plan_and_parity_around_an_update(tmp_path: Path) -> None:
    code, page = check(tmp_path, "--quick")
    assert code == 0, page
    assert "| tests | not run: " in page
    memory = re.search(r"^\| 0\.6B \| 1 of 28 \|.* (\S+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert memory is not None, page
    assert float(memory[1]) == pytest.approx(float(memory[2]), rel=0.1)
    parities = re.findall(
        r"^\| local \| (before|after) the update \| varlen \| \d+ \| (\S+) ", page, re.MULTILINE
    )
    assert [name for name, _ in parities] == ["before", "after"]
    assert all(0 < float(mean) < 2e-2 for _, mean in parities)
    assert "## Publication" in page


def test_a_part_that_fails_is_a_line_with_its_reason(tmp_path: Path) -> None:
    code, page = check(
        tmp_path, "--only", "engine", "--engine", "sglang", AGENTRL_SGLANG_VENV=str(tmp_path / "none")
    )
    assert code == 1
    assert re.search(r"^\| engine \| \*\*failed\*\*: .*sglang is not installed", page, re.MULTILINE), page
