"""Write an adapter's folder as a checkpoint holds it."""

from __future__ import annotations

from pathlib import Path

from agentrl.model.lora import WEIGHTS_FILE, Adapter
from agentrl.weights.sharded_writer import Written, write_beside, write_share
from agentrl.weights.snapshot import FilePlan, Snapshots


def write_adapter(adapter: Adapter, folder: Path) -> Written:
    """Write peft's files into ``folder``, which exists."""
    plan = [FilePlan(WEIGHTS_FILE, 0, (tuple(part.name for part in adapter.parts()),), 0)]
    written = write_share(folder, Snapshots(adapter, plan).take())
    write_beside(folder, written, adapter.configuration())
    return written
