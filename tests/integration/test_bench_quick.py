"""The quick form of every benchmark runs, and ends with 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
ALL = sorted(
    path.stem for path in BENCH.glob("*.py") if "add_quick(" in path.read_text() or path.stem == "gpu_check"
)
ELSEWHERE = {
    "gpu_check": "test_gpu_check.py runs it",
    "harness": "the parts that benchmarks share",
    "time_to_reward": "a whole quickstart: tests/acceptance has one",
}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def test_every_benchmark_has_a_quick_form() -> None:
    programs = [
        path.stem
        for path in BENCH.glob("*.py")
        if "__main__" in path.read_text() and "add_argument" in path.read_text() and path.stem[0] != "_"
    ]
    children = {"time_to_reward_trl"}
    assert sorted(set(programs) - children) == sorted(set(ALL) - {"harness"})


@pytest.mark.parametrize("name", sorted(set(ALL) - ELSEWHERE.keys()))
def test_the_quick_form_runs(name: str, tmp_path: Path) -> None:
    if name == "learning":
        pytest.importorskip("reasoning_gym")
    command = [sys.executable, str(BENCH / f"{name}.py"), "--quick"]
    source = str(BENCH.parents[1] / "src")
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command,
        cwd=BENCH.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
