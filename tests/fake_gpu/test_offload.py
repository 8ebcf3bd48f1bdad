"""What moves to the host: a trainer that leaves its GPU and comes back, and the inputs of layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fake_gpu.cases import BATCHES, HIDDEN, LAYERS, LAYOUTS, TOKENS, Case
from fake_gpu.conftest import Steps

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


def test_split_layers_keep_their_inputs_on_the_host(run_steps: Steps) -> None:
    """It changes no exchange between GPUs and adds no wait of the host."""
    layout = LAYOUTS[8]["tp×cp"]
    kept, moved = run_steps(
        [Case(model="dense", layout=layout, offload=offload) for offload in (False, True)]
    )
    assert (moved["calls"], moved["bytes"], moved["reads"]) == (kept["calls"], kept["bytes"], kept["reads"])
    assert not kept["moved"]
    inputs = LAYERS * BATCHES * TOKENS // layout["cp"] * HIDDEN * torch.bfloat16.itemsize
    assert moved["moved"]["bfloat16"] >= inputs
