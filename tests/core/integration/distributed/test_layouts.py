from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LAYOUTS = {2: ["fsdp2", "fsdp2_gspo", "tp2", "cp2", "ep2", "pp2_tied"], 4: ["dp_replicate2×fsdp2"]}
"""By the number of processes; ``scripts/test_distributed.sh`` runs all."""


def run_together(world: int, program: str, *arguments: str) -> str:
    """What a program of this folder prints in ``world`` processes; all of them must end well."""
    finished = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world),
            str(FOLDER / program), *arguments,
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"},
        capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr[-4000:]
    return finished.stdout


@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("world", "products"), [(2, "float32"), (2, "bfloat16"), (4, "float32")])
def test_layouts_train_like_one_process_and_resume_in_another(
    world: int, products: str, tmp_path: Path
) -> None:
    told = run_together(
        world, "layouts.py", *LAYOUTS[world], "--products", products, "--folder", str(tmp_path)
    )
    assert [line.split()[0] for line in told.splitlines() if line.endswith("  ok")] == LAYOUTS[world]


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_gradients_are_reduced_once_a_step_and_an_aborted_step_leaves_none() -> None:
    told = run_together(2, "accumulation.py")
    assert "last: " in told
    assert "every: " in told


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_one_file_of_weights_is_in_memory_and_a_full_disk_leaves_the_processes_in_step(
    tmp_path: Path,
) -> None:
    assert "after a failure" in run_together(2, "publishing.py", "--folder", str(tmp_path))
