from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("sharded_experts.py")


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_sharded_experts_compute_what_whole_ones_do() -> None:
    finished = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            str(PROGRAM),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"},
        capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr[-4000:]
    assert finished.stdout.count("ok\n") == 18, finished.stdout
