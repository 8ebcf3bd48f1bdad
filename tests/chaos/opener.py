"""Load many tasks and open their epochs without sampling them: ``python -m chaos.opener``.

Several openers run at once: an interrupted opening is taken over and completed by another one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass

from agentrl.config.load import parse
from agentrl.config.schema import RunConfig, flag
from agentrl.documents.task_file import read_tasks

logger = logging.getLogger(__name__)

SPLIT = "openings"
GENERATIONS = 1


@dataclass(frozen=True, kw_only=True)
class OpenerConfig:
    """The flags of an opener."""

    openings_file: str = flag("", "task file of the split whose epochs are opened")
    openings: int = flag(6, "total number of epochs to open")
    openings_pause: float = flag(1.0, "seconds between two epochs")


def main(argv: list[str]) -> int:
    """Open every epoch, then wait for SIGTERM."""
    configs = parse(
        argv, command="opener", description="Opens epochs.", shown=[RunConfig], extra=[OpenerConfig]
    )
    from agentrl.observe.logging import setup

    setup(configs[RunConfig], "opener")
    asyncio.run(open_all(configs[RunConfig], configs[OpenerConfig]))
    return 0


async def open_all(run: RunConfig, config: OpenerConfig) -> None:
    """Load the file, then open the epochs one by one, as samplers do."""
    from agentrl.store.client import open_store
    from agentrl.store.mechanics.retry import retry_outages

    result = read_tasks(config.openings_file, split=SPLIT, seed=run.seed, num_generations=GENERATIONS)
    with retry_outages(run.db_wait_seconds):
        async with await open_store(run) as store:
            await store.tasks.load(result.tasks)
            while True:
                epoch = await store.epochs.next(SPLIT, config.openings)
                if epoch is not None:
                    opened = await store.epochs.open(SPLIT, epoch, run.seed, GENERATIONS)
                    logger.info("epoch %d: %d tasks were missing", epoch, opened)
                await asyncio.sleep(config.openings_pause)


if __name__ == "__main__":
    from agentrl.cli.main import run as run_command

    sys.exit(run_command(lambda: main(sys.argv[1:]), "opener"))
