"""Supervised fine-tuning by two processes is that by one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sft_run import losses, write_conversations
from tiny_policy import write_tiny_policy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.usefixtures("starts_warm")]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def fine_tune(folder: Path, output: str, *launcher: str, more: tuple[str, ...] = ()) -> tuple[int, str]:
    flags = (
        "--model_name_or_path", "base", "--train_file", "conversations.jsonl", "--batch_size", "7",
        "--learning_rate", "1e-2", "--max_tokens", "100", "--log_steps", "1", "--max_steps", "4",
        "--output_dir", output, *more,
    )  # fmt: skip
    finished = subprocess.run(
        [sys.executable, *launcher, "-m", "agentrl", "sft", *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"},
        cwd=folder, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    return finished.returncode, finished.stdout + finished.stderr


def contents(folder: Path) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The tensors in the files of all ranks, and the names of the other files."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    return tensors, {path.name for path in folder.iterdir() if "safetensors" not in path.name}


@pytest.mark.parametrize("more", [(), ("--lora_rank", "3")])
def test_two_processes_fine_tune_as_one_does(more: tuple[str, ...], tmp_path: Path) -> None:
    write_tiny_policy(tmp_path / "base")
    write_conversations(tmp_path / "conversations.jsonl")
    (code, alone), (codes, together) = (
        fine_tune(tmp_path, "one", more=more),
        fine_tune(tmp_path, "two", *TORCHRUN, more=more),
    )
    assert code == 0, alone
    assert codes == 0, together
    assert len(losses(alone)) == 4
    assert losses(together) == pytest.approx(losses(alone), abs=2e-4)
    (one, beside), (two, beside_two), (base, _) = (
        contents(tmp_path / name) for name in ("one", "two", "base")
    )
    assert one.keys() == two.keys() == base.keys()
    assert any(not torch.equal(one[key], base[key]) for key in base)
    assert all(torch.allclose(one[key], two[key], atol=1e-4) for key in one)
    assert beside == beside_two


@pytest.mark.parametrize("flag", ["lora_rank", "torch_compile"])
def test_what_two_processes_cannot_train_together_is_told(flag: str, tmp_path: Path) -> None:
    write_tiny_policy(tmp_path / "base")
    write_conversations(tmp_path / "conversations.jsonl")
    code, output = fine_tune(tmp_path, "two", *TORCHRUN, more=(f"--{flag}", "1", "--tp_size", "2"))
    assert code == 1
    assert re.search(rf"--{flag} (1|True) with --tp_size 2", output)
