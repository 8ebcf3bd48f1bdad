"""The whole loop as a person runs it: start, lose a sampler, press Ctrl-C, start again, learn."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
from walks.held import recording, require_short_walks

ROOT = Path(__file__).parents[2]
STEPS = 15
"""Of the 30 by default: the reward has risen by then."""
ORDINARY_CPU = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""Without the instructions for bfloat16 that some CPUs have."""
LAST_LINE = re.compile(r"^reward (\d\.\d+) -> (\d\.\d+) over (\d+) steps$")


class Quickstart:
    """``agentrl quickstart --tiny`` in a folder of its own."""

    def __init__(
        self, folder: Path, python: str | Path, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.log = folder / f"terminal-{time.monotonic_ns()}.txt"
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                [str(python), "-m", "agentrl", "quickstart", "--tiny", "--steps", str(STEPS)],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, condition, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it ended early:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"not in {seconds} s:\n{self.output[-4000:]}"
            time.sleep(0.2)

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()


def commands_in(folder: Path, word: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and word in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def processes_in(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.acceptance
@pytest.mark.integration
@pytest.mark.timeout(1200)
def test_the_tiny_quickstart_survives_a_kill_and_an_interrupt_and_learns(tmp_path, warm_python):
    (tmp_path / "assets").symlink_to(ROOT / "assets")

    first = Quickstart(tmp_path, warm_python)
    weights = tmp_path / "output/quickstart-tiny/weights"
    first.wait_until(lambda: (weights / "v000002").is_dir(), 400)
    samplers = commands_in(tmp_path, "sample")
    assert len(samplers) == 2
    samplers[0].send_signal(signal.SIGKILL)
    first.wait_until(lambda: (weights / "v000004").is_dir(), 120)
    first.process.send_signal(signal.SIGINT)
    assert first.wait(120) == 130
    assert processes_in(tmp_path) == []

    second = Quickstart(tmp_path, sys.executable, ORDINARY_CPU | recording(tmp_path / "walks"))
    assert second.wait(700) == 0, second.output[-4000:]
    assert "resuming" in second.output
    assert "on this machine" in second.output, "the time that the rest takes"
    assert "products in float32, weights in float32" in second.output
    outcome = LAST_LINE.match(second.output.strip().splitlines()[-1])
    assert outcome, second.output[-2000:]
    assert all(f"  {title}: score" in second.output for title in ("first wrong", "first right", "longest"))
    start, end = float(outcome[1]), float(outcome[2])
    assert int(outcome[3]) == STEPS
    assert end >= 0.8
    assert end >= 2 * start
    assert (tmp_path / "output/quickstart-tiny/curve.png").stat().st_size > 10_000
    assert processes_in(tmp_path) == []
    require_short_walks(tmp_path / "walks")
