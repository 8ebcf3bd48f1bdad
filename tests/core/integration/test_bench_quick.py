"""The quick form of every benchmark runs, and ends with 0."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "scripts" / "bench"
CHILDREN = {"harness", "time_to_reward_trl"}
"""The parser of every benchmark, and a program that one starts."""
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in BENCH.glob("*.py")}
PROGRAMS = sorted(
    name
    for name, text in SOURCES.items()
    if ("ArgumentParser(" in text or "bench_parser(__doc__)" in text) and name not in CHILDREN
)
ELSEWHERE = {
    "credit": "it trains as learning.py does, whose quick form runs",
    "distill": "test_teaching.py runs its parts",
    "preferences": "it trains the quickstart's model; test_whatif.py and test_preferences.py have its parts",
    "gpu_check": "test_gpu_check.py runs it",
    "time_to_reward": "it runs the quickstart, as tests/acceptance does",
    "whatif": "it runs the quickstart too, and test_whatif.py trains stored steps again",
}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_benchmark_has_a_quick_form(name: str) -> None:
    assert "bench_parser(" in SOURCES[name] or '"--quick"' in SOURCES[name]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ELSEWHERE])
def test_the_quick_form_runs(name: str, tmp_path: Path, warm_python: Path) -> None:
    if name == "learning":
        pytest.importorskip("reasoning_gym")
    paths = {"PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [str(warm_python), str(BENCH / f"{name}.py"), "--quick"], cwd=ROOT, env={**os.environ, **paths},
        capture_output=True, text=True, timeout=390, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
