"""Read a task file or the tasks of an environment, and load them into a run, as a sampler does."""

from __future__ import annotations

from agentrl.config.schema import RunConfig, TaskConfig
from agentrl.rollout.load_tasks import load_read_tasks, read_task_file
from agentrl.store.client import Store


async def load_tasks(
    store: Store, run: RunConfig, tasks: TaskConfig, path: str, *, split: str, num_generations: int
) -> None:
    """Load ``path`` into ``split``."""
    read = await read_task_file(run, tasks, path, split=split, num_generations=num_generations)
    await load_read_tasks(store, path, read)
