"""A group whose last sample is in → advantages and training data, in one transaction, by whoever notices."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from agentrl.config.schema import GroupConfig
from agentrl.conversion.outcome import TRAIN_SPLIT, GroupRules

if TYPE_CHECKING:
    from agentrl.store.client import Store

__all__ = ["TRAIN_SPLIT", "Finaliser"]

logger = logging.getLogger(__name__)

_BATCH = 16


class Finaliser:
    """Finalises groups of one split. Several samplers may try the same group: one of them does it."""

    def __init__(self, store: Store, config: GroupConfig, *, split: str, seed: int) -> None:
        """Groups of ``TRAIN_SPLIT`` become training data; those of any other split are only summed up."""
        self._store = store
        self._split = split
        self._rules = GroupRules(config=config, seed=seed)

    async def run_waiting(self) -> int:
        """Finalise every group that waits; returns how many this call did."""
        done = 0
        while waiting := await self._store.training.waiting_groups(self._split, _BATCH):
            finished = [await self.finalise(task_id) for task_id in waiting]
            done += sum(finished)
            if not any(finished):
                break
        return done

    async def finalise(self, task_id: str) -> bool:
        """Finalise one waiting group; False if another process did."""
        done = await self._store.training.finalise_group(task_id, self._rules.decide)
        if done:
            logger.info("group finalised", extra={"task": task_id})
        return done
