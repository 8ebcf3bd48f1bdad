"""The programs of this folder, each in several processes that torchrun starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.usefixtures("starts_warm")]

FOLDER = Path(__file__).parent
LAYOUTS = {2: ["fsdp2", "fsdp2_gspo", "tp2", "cp2", "ep2", "pp2_tied"], 4: ["dp_replicate2×fsdp2"]}
"""By the number of processes; ``scripts/test_distributed.sh`` runs all."""
AT_VERSION = ["tp2_version", "cp2_version", "ep2_version", "pp2_version"]
"""With ``--old_logprobs version``, once: dtypes do not matter to who reads which value."""
IDLE = ["fsdp2_idle", "cp2_idle", "pp2_idle"]
"""With trajectories that are not computed, once."""
LOADED = {
    2: ["fsdp2", "fsdp2_lora_bf16", "tp2_tied", "ep2", "pp2_tied"],
    4: ["fsdp2×tp2", "ep2×fsdp2", "pp2×fsdp2"],
}
"""The same of ``loading.py``; its other layouts are run by hand."""


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


def good(told: str) -> list[str]:
    """The layouts that ``told`` calls ok."""
    return [line.split()[0] for line in told.splitlines() if line.endswith("  ok")]


@pytest.mark.parametrize(("world", "products"), [(2, "float32"), (2, "bfloat16"), (4, "float32")])
def test_layouts_train_like_one_process_and_resume_in_another(
    world: int, products: str, tmp_path: Path
) -> None:
    layouts = LAYOUTS[world] + (AT_VERSION + IDLE if (world, products) == (2, "float32") else [])
    more = ("--products", products, "--folder", str(tmp_path))
    assert good(run_together(world, "layouts.py", *layouts, *more)) == layouts


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_read_their_shards_alone_and_train_as_if_loaded_whole(world: int, tmp_path: Path) -> None:
    told = run_together(world, "loading.py", *LOADED[world], "--folder", str(tmp_path))
    assert good(told) == LOADED[world]


def test_gradients_are_reduced_once_a_step_and_an_aborted_step_leaves_none() -> None:
    told = run_together(2, "accumulation.py")
    assert "last: " in told
    assert "every: " in told


def test_a_critic_is_trained_as_in_one_process_and_resumes_in_another_layout(tmp_path: Path) -> None:
    """cp2 shards and splits tokens; the other layouts are run by hand."""
    assert good(run_together(2, "critic.py", "cp2", "--folder", str(tmp_path))) == ["cp2_head", "cp2_model"]


def test_one_file_of_weights_is_in_memory_and_a_full_disk_leaves_the_processes_in_step(
    tmp_path: Path,
) -> None:
    assert "after a failure" in run_together(2, "publishing.py", "--folder", str(tmp_path))


def test_sharded_experts_compute_what_whole_ones_do() -> None:
    told = run_together(2, "sharded_experts.py")
    assert told.count("ok\n") == 18, told
