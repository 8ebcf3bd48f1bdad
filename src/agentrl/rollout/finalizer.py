"""Finalize groups: once every sample has a score, write advantages and training data in one transaction."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import TRAIN_SPLIT, GroupRules
from agentrl.documents.task import CONVERSATIONS
from agentrl.errors import StoreUnavailableError
from agentrl.rollout.agent_io import failure_text
from agentrl.scoring.groups import alone

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.groups import GroupOutcome, StoredGroup

logger = logging.getLogger(__name__)

_BATCH = 16
ATTEMPTS = 4
"""Attempts to finalize a group before it is given up."""
RETRY_SECONDS = 5.0
"""Wait after the first failed attempt; doubles with each attempt."""


class GroupFinalizer:
    """Finalize the groups of one split. The process that wrote a group's last score does it.

    Several samplers may try the same group; exactly one succeeds.
    """

    def __init__(self, store: Store, config: GroupConfig, *, split: str, seed: int) -> None:
        """Groups of ``TRAIN_SPLIT`` become training data; groups of other splits are only summarized."""
        self._store = store
        self._split = split
        self._rules = GroupRules(config=config, seed=seed)
        self.columns = config.column_names if split == TRAIN_SPLIT else ()
        """The columns that a group waits for."""
        self._logged: set[str] = set()

    async def run_completed(self) -> int:
        """Finalize the groups that this process completed; return how many this call finalized."""
        completed = self._store.attempts.completed.take(self._split)
        return sum([await self.finalize(task_id) for task_id in completed])

    async def run_waiting(self, waiting_seconds: float = 0.0) -> int:
        """Finalize every group that has waited for ``waiting_seconds``; return how many this call finalized.

        This covers groups whose process ended after their last score and before they were finalized.
        """
        done = 0
        while waiting := await self._store.groups.waiting(self._split, _BATCH, waiting_seconds):
            finished = [await self.finalize(task_id) for task_id in waiting]
            done += sum(finished)
            if not any(finished):
                break
        return done

    async def finalize(self, task_id: str) -> bool:
        """Finalize one waiting group; return False if another process did or if this attempt failed.

        A failed attempt is counted in the Task and retried later; after ``ATTEMPTS`` the group is given up.
        Raises StoreUnavailableError only; an outage does not count as an attempt.
        """
        try:
            done = await self._store.groups.finalize(task_id, self._decide, self.columns)
        except StoreUnavailableError:
            raise
        except Exception as error:
            logger.exception("group not finalized", extra={"task": task_id})
            await self._failed(task_id, error)
            return False
        if done:
            logger.info("group finalized", extra={"task": task_id})
        return done

    def _decide(self, group: StoredGroup) -> GroupOutcome:
        """Decide the group; log once per sampling parameter that it masks model calls."""
        rules = self._rules
        if group.task.epoch == CONVERSATIONS:
            rules = replace(rules, config=alone(rules.config))
        outcome = rules.decide(group)
        for masked in outcome.summary.get("masked_calls", ()):
            name = masked["because"].partition(" ")[0]
            if name not in self._logged:
                self._logged.add(name)
                logger.warning(
                    "model calls sampled with %s are recorded and not trained: the engine's logprobs leave it"
                    " out (`agentrl audit record`, Task.group.masked_calls)",
                    masked["because"],
                    extra={"task": group.task.id, "calls": masked["calls"]},
                )
        return outcome

    async def _failed(self, task_id: str, error: Exception) -> None:
        """Count the failed attempt. If that fails too, the group is retried and the others continue."""
        try:
            await self._count(task_id, error)
        except StoreUnavailableError:
            raise
        except Exception:
            logger.exception("a failed attempt is not counted", extra={"task": task_id})

    async def _count(self, task_id: str, error: Exception) -> None:
        groups = self._store.groups
        problem = failure_text(error)
        attempts = await groups.count_failed_attempt(task_id, problem, retry_seconds=RETRY_SECONDS)
        if attempts >= ATTEMPTS and await groups.give_up(task_id, problem, self._rules.to_store()):
            logger.error("group given up", extra={"task": task_id, "attempts": attempts, "why": problem})
