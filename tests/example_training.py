"""Train the trajectories that the test of an example sampled, by a real trainer in a process of its own.

It starts in 0.1 s where the test has ``starts_warm``.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.config.schema import RunConfig
from agentrl.documents.status import StepStatus
from agentrl.store.client import Store


async def train_steps(
    store: Store, run: RunConfig, flags: Sequence[str], model: Path, *, steps: int = 2
) -> None:
    """Run ``agentrl train`` with an example's ``flags``; it must end with this number of committed steps."""
    command = [
        sys.executable, "-m", "agentrl.train", *flags, "--model_name_or_path", str(model),
        "--db_connection_string", str(run.db_connection_string), "--output_dir", str(run.output_dir),
        "--log_dir", run.log_dir,
    ]  # fmt: skip
    ended = await asyncio.to_thread(
        subprocess.run, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert len(await store.steps.find(status=StepStatus.COMMITTED)) == steps
