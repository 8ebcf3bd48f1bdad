"""A group whose last sample is in → advantages and training data, in one transaction, by whoever notices."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentrl.config.schema import GroupConfig
from agentrl.conversion.convert import to_training_data
from agentrl.documents.dispatch import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.status import RecordStatus, SlotStatus
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData
from agentrl.errors import StoreError
from agentrl.scoring.groups import Decision, decide_group, summarise
from agentrl.store.groups import GroupOutcome, RecordOutcome

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

TRAIN_SPLIT = "train"
_BATCH = 16


class Finaliser:
    """Finalises groups of one split. Several samplers may try the same group: one of them does it."""

    def __init__(self, store: Store, config: GroupConfig, *, split: str, seed: int) -> None:
        """Groups of ``TRAIN_SPLIT`` become training data; those of any other split are only summed up."""
        self._store = store
        self._config = config
        self._split = split
        self._seed = seed

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
        done = await self._store.training.finalise_group(task_id, self.decide)
        if done:
            logger.info("group finalised", extra={"task": task_id})
        return done

    def decide(
        self,
        task: Task,
        records: Sequence[Record],
        calls: Mapping[str, Sequence[DispatchedSamplingTask]],
    ) -> GroupOutcome:
        """What becomes of a group; the same whoever computes it."""
        scored = [record for record in records if record.score is not None]
        failed = sum(slot.status is SlotStatus.FAILED for slot in task.slots)
        if self._split != TRAIN_SPLIT:
            outcomes = [_outcome(record.id, RecordStatus.READY) for record in scored]
            return GroupOutcome(data=(), records=tuple(outcomes), summary=summarise(scored, failed, 0))
        decisions = decide_group(scored, self._config, random.Random(f"{self._seed}/{task.id}"))
        by_id = {record.id: record for record in scored}
        data: list[DBRecordData] = []
        outcomes = []
        for decision in decisions:
            converted = self._convert(task, by_id[decision.record_id], calls, decision)
            if isinstance(converted, DBRecordData):
                data.append(converted)
                outcomes.append(_outcome(decision.record_id, RecordStatus.READY, decision.advantage))
            else:
                outcomes.append(_outcome(decision.record_id, RecordStatus.ABANDONED, None, converted))
        summary = summarise(scored, failed, len(data))
        return GroupOutcome(data=tuple(data), records=tuple(outcomes), summary=summary)

    def _convert(
        self,
        task: Task,
        record: Record,
        calls: Mapping[str, Sequence[DispatchedSamplingTask]],
        decision: Decision,
    ) -> DBRecordData | str:
        """Training data, or why there is none."""
        if decision.advantage is None:
            return decision.abandoned_because or "abandoned"
        try:
            data = to_training_data(task, record, calls.get(record.id, ()), decision.advantage, self._config)
        except StoreError as error:
            logger.error("a trajectory cannot be trained", extra={"record": record.id, "why": error.message})
            return error.message
        return data if data is not None else "no model call has an advantage to train with"


def _outcome(
    record_id: str, status: RecordStatus, advantage: float | None = None, because: str | None = None
) -> RecordOutcome:
    return RecordOutcome(record_id=record_id, status=status, advantage=advantage, because=because)
