from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def two_processes(program: str, *arguments: str) -> str:
    """What a program of this folder prints in two processes; all of them must end well."""
    finished = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            str(FOLDER / program), *arguments,
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"},
        capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr[-4000:]
    return finished.stdout


@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "cp2", "ep2", "pp2_tied"])
def test_a_layout_trains_like_one_process_and_resumes_in_another(layout: str, tmp_path: Path) -> None:
    assert "ok" in two_processes("layouts.py", layout, "--folder", str(tmp_path))


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_gradients_are_reduced_once_a_step_and_a_step_that_broke_off_leaves_none() -> None:
    told = two_processes("accumulation.py")
    assert "last: " in told
    assert "every: " in told


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_one_file_of_weights_is_in_memory_and_a_full_disk_leaves_the_processes_in_step(
    tmp_path: Path,
) -> None:
    assert "after a failure" in two_processes("publishing.py", "--folder", str(tmp_path))
