"""Train the trajectories that the test of an example sampled, by a real trainer in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from forked import run_forked

from agentrl.config.schema import RunConfig
from agentrl.documents.status import StepStatus
from agentrl.store.client import Store


async def train_steps(
    store: Store, run: RunConfig, flags: Sequence[str], model: Path, *, steps: int = 2
) -> None:
    """Run ``agentrl train`` with an example's ``flags``; it must end with this number of committed steps."""
    words = [
        *flags, "--model_name_or_path", str(model), "--db_connection_string", str(run.db_connection_string),
        "--output_dir", str(run.output_dir), "--log_dir", run.log_dir,
    ]  # fmt: skip
    log = Path(run.log_dir).with_suffix(".train")
    code, output = await asyncio.to_thread(
        run_forked, ("-m", "agentrl.train"), words, log, 200, CUDA_VISIBLE_DEVICES=""
    )
    assert code == 0, output[-3000:]
    assert len(await store.steps.find(status=StepStatus.COMMITTED)) == steps
