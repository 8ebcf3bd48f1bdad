"""A trainer leaves its GPU and comes back, with sharded weights, moments and a reference model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fake_gpu, pytest.mark.timeout(300)]


def test_the_trainer_moves_to_the_host_and_back(guard: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fake_gpu.fake_offload"],
        env={**os.environ, "LD_PRELOAD": str(guard), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["on the host"] < 1000  # the step counts of AdamW
    assert found["trained"] > 5 * 2**20
    assert found["trained"] == found["back"] == found["trained again"]
