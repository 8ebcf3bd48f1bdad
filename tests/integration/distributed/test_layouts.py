from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("layouts.py")


@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "cp2", "ep2", "pp2_tied"])
def test_a_layout_trains_like_one_process_and_resumes_in_another(layout: str, tmp_path: Path) -> None:
    finished = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            str(PROGRAM), layout, "--folder", str(tmp_path),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"},
        capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr[-4000:]
    assert "ok" in finished.stdout
