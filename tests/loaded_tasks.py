"""Read a task file or the tasks of an environment, and load them into a run, as a sampler does."""

from __future__ import annotations

from dataclasses import replace

from agentrl.config.schema import RunConfig, TaskConfig
from agentrl.rollout.load_tasks import load_read_tasks, read_source
from agentrl.store.client import Store


async def load_tasks(
    store: Store, run: RunConfig, tasks: TaskConfig, path: str, *, split: str, num_generations: int
) -> None:
    """Load ``path`` into ``split``."""
    flags = replace(tasks, num_generations=num_generations)
    read = await read_source(path, flags, split=split, seed=run.seed)
    await load_read_tasks(store, path, read)
