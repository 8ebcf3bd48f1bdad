"""The local engine on a GPU that is not there: nothing that it computes is on another device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_policy import write_tiny_policy

pytestmark = [pytest.mark.fake_gpu, pytest.mark.timeout(300)]


def test_a_prompt_and_a_running_sequence_on_a_fake_gpu(guard: Path, tmp_path: Path) -> None:
    folder = write_tiny_policy(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fake_gpu.fake_engine", str(folder)],
        env={**os.environ, "LD_PRELOAD": str(guard), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["device"], found["mixed"]) == ("cuda:0", {})
    assert found["shape"][0] == 2
