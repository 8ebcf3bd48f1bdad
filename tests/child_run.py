"""A fork of the small run after its only step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from small_run import STEP, build, write_checkpoint

from agentrl.documents.run import PARENT, PolicyVersion, Relative
from agentrl.lab.fork import Begun, Fork
from agentrl.store.client import Store


@asynccontextmanager
async def forked_small_run(store: Store, folder: Path) -> AsyncIterator[tuple[Store, Begun]]:
    """Fill ``store`` and yield the store of its child, whose database is dropped at the end."""
    await build(store, folder / "weights")
    checkpoint = folder / "output" / "checkpoint-000001"
    write_checkpoint(checkpoint, 1, (STEP,))
    (checkpoint / "model").mkdir()
    begun = Relative(id=PARENT, run=store.run_name, kind="fork", step=1, checkpoint=str(checkpoint))
    model = PolicyVersion(id=0, step=0, location=str(checkpoint / "model"), files=(), train_step=None)
    name = f"{store.run_name}_child"
    try:
        yield store.beside(name), await Fork(store.connection).begin(name, begun, model)
    finally:
        await store.connection.client.drop_database(name)
