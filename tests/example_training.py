"""Train the trajectories that the test of an example sampled, by a real trainer on a tiny model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tiny_policy import write_tiny_policy

from agentrl.config.schema import RunConfig
from agentrl.documents.status import StepStatus
from agentrl.store.client import Store


async def train_steps(
    store: Store, run: RunConfig, flags: Sequence[str], folder: Path, *, steps: int = 2
) -> None:
    """Run ``agentrl train`` with an example's ``flags``; it must end with this number of committed steps."""
    command = [
        sys.executable, "-m", "agentrl", "train", *flags, "--model_name_or_path",
        str(write_tiny_policy(folder)), "--db_connection_string", str(run.db_connection_string),
        "--output_dir", str(run.output_dir), "--log_dir", run.log_dir,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(await store.steps.find(status=StepStatus.COMMITTED)) == steps
