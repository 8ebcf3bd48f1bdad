"""Epochs: one process at a time inserts an epoch's tasks; an epoch is open once it holds every task."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agentrl.documents.run import EpochOpening, epoch_key
from agentrl.documents.status import EpochStatus
from agentrl.documents.task import CONTENT, Slot, Task, task_key
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store import slots
from agentrl.store.connection import Connection, Json, Repository, database_call
from agentrl.store.epoch_leases import EpochLeases, ids_of
from agentrl.store.names import TASK

logger = logging.getLogger(__name__)

LOAD_WAIT_SECONDS = 600.0
"""How long a load waits for another process that loads the same split."""

_BATCH = 1000
_POLL_SECONDS = 0.25


class Epochs(Repository):
    """Opens epochs under leases. Epoch 0 is what was loaded; each later epoch is a copy of it.

    ``Epoch`` has a document for each: whether it is open, and who inserts its tasks. Tasks may be claimed as
    soon as they are there. When the owner dies, another process takes the opening over and inserts only what
    is missing. Tasks that are loaded late join every epoch: one that holds fewer tasks than epoch 0 is opened
    again.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._leases = EpochLeases(connection)

    @database_call
    async def next_epoch(self, split: str, epochs: int) -> int | None:
        """Return the first epoch to open, of ``epochs`` and those begun; None when all of them are open."""
        openings = await self._leases.of_split(split)
        for epoch in range(max(epochs, max(openings, default=0) + 1)):
            if not await self._is_open(split, epoch, openings):
                return epoch
        return None

    @database_call
    async def epoch_size(self, split: str) -> int:
        """Return how many tasks every epoch has; while epoch 0 is being loaded, how many it will have."""
        first = (await self._leases.of_split(split)).get(0)
        return await self._count(split, 0) if first is None else first.tasks

    @database_call
    async def open_epoch(
        self, split: str, epoch: int, seed: int, num_generations: int, shuffle: bool = True
    ) -> int:
        """Copy the tasks of epoch 0 into ``epoch``, in an order of its own; return how many were missing.

        Writes nothing while an earlier epoch is not open, or while another process opens this one.
        """
        if epoch == 0 or await self.next_epoch(split, epoch + 1) != epoch:
            return 0
        loaded = await self._count(split, 0)
        first = EpochOpening(id=epoch_key(split, 0), status=EpochStatus.OPEN, tasks=loaded)
        await self._leases.make(first)  # the first epoch of an older run has no document
        begun = await self._collection(TASK).find_one({"split": split, "epoch": epoch}, {"slots": 1})
        opening = EpochOpening(
            id=epoch_key(split, epoch), tasks=loaded, seed=seed, shuffle=shuffle,
            num_generations=num_generations if begun is None else len(begun["slots"]),
        )  # fmt: skip
        async with self._leases.lock(opening.id):
            held = await self._leases.acquire(opening, copies=True)
            if held is None:
                return 0
            try:
                async with self._leases.releasing(held):
                    return await self._copy(split, epoch, held)
            except LeaseLostError as error:
                logger.warning("%s", error.message)
                return 0

    @asynccontextmanager
    async def loading(self, split: str, epoch: int) -> AsyncIterator[LoadLease]:
        """Hold the lease of an epoch while its tasks are inserted from a file; it is open at the end.

        Waits for another process that holds it, for up to ``LOAD_WAIT_SECONDS``.
        """
        key = epoch_key(split, epoch)
        async with self._leases.lock(key):
            earlier = (await self._leases.of_split(split)).get(epoch)
            held = await self.wait_for_lease(key)
            async with self._leases.releasing(held):
                lease = LoadLease(self, self._leases, held)
                yield lease
                tasks = await self.count(split, epoch)
                await self._leases.finish(lease.held, tasks)
        if earlier is not None and earlier.status is EpochStatus.OPENING and earlier.tasks > tasks:
            logger.warning(
                "an earlier load of split %s was interrupted: it expected %d tasks, and there are %d now;"
                " if it was of another file, load that file again", split, earlier.tasks, tasks,
            )  # fmt: skip

    async def is_loaded(self, split: str, epoch: int) -> bool:
        """Return whether the last load of the epoch ended; False where none is recorded."""
        opening = (await self._leases.of_split(split)).get(epoch)
        return opening is not None and opening.status is EpochStatus.OPEN

    @database_call
    async def count(self, split: str, epoch: int) -> int:
        """Return how many tasks an epoch holds now."""
        return await self._count(split, epoch)

    async def wait_for_lease(self, key: str) -> EpochOpening:
        """Take the lease of an epoch for a load as soon as it is free."""
        deadline = time.monotonic() + LOAD_WAIT_SECONDS
        while (held := await self._leases.acquire(EpochOpening(id=key))) is None:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"another process has been loading epoch {key} for {LOAD_WAIT_SECONDS:g} s",
                    hint="wait until it ends, or stop it; then load again",
                )
            await asyncio.sleep(_POLL_SECONDS)
        return held

    async def _copy(self, split: str, epoch: int, held: EpochOpening) -> int:
        tasks = self._collection(TASK)
        cursor = tasks.find({"split": split, "epoch": 0}, {"_id": 0, "order": 1, "task_id": 1})
        places = sorted([(task["order"], task["task_id"]) async for task in cursor])
        ordered = [task_id for _, task_id in places]
        if held.shuffle:
            random.Random(f"{held.seed}/{epoch}").shuffle(ordered)
        present = {task["_id"] async for task in tasks.find({"_id": ids_of(f"{split}/{epoch}/")}, {"_id": 1})}
        missing = [
            (order, task_id)
            for order, task_id in enumerate(ordered)
            if task_key(split, epoch, task_id) not in present
        ]
        for start in range(0, len(missing), _BATCH):
            await self._copy_batch(split, epoch, missing[start : start + _BATCH], held.num_generations or 1)
            await self._leases.renew(held)
        await self._leases.finish(held, await self._count(split, epoch))
        return len(missing)

    async def _copy_batch(
        self, split: str, epoch: int, places: Sequence[tuple[int, str]], generations: int
    ) -> None:
        """Copy tasks (order, task_id) inside the server; one that is there already stays as it is."""
        ids = [task_id for _, task_id in places]
        orders = slots.literal([order for order, _ in places])
        new = Task(
            id="", task_id="", split=split, epoch=epoch, order=0, query="",
            slots=tuple(Slot(traj_id=number) for number in range(generations)),
        )  # fmt: skip
        copy: Json = {name: slots.literal(value) for name, value in new.to_document().items()}
        copy |= {name: f"${name}" for name in ("task_id", *CONTENT)}
        copy |= {
            "_id": {"$concat": [slots.literal(task_key(split, epoch, "")), "$task_id"]},
            "order": {"$arrayElemAt": [orders, {"$indexOfArray": [slots.literal(ids), "$task_id"]}]},
            "created_at": "$$NOW",
            "updated_at": "$$NOW",
        }
        pipeline: list[Json] = [
            {"$match": {"_id": {"$in": [task_key(split, 0, task_id) for task_id in ids]}}},
            {"$replaceWith": copy},
            {"$merge": {"into": TASK, "whenMatched": "keepExisting", "whenNotMatched": "insert"}},
        ]
        await (await self._collection(TASK).aggregate(pipeline)).to_list()

    async def _is_open(self, split: str, epoch: int, openings: dict[int, EpochOpening]) -> bool:
        """Epochs of older runs have no document: one with tasks is open if it has as many as epoch 0."""
        opening, first = openings.get(epoch), openings.get(0)
        if opening is not None:
            return opening.status is EpochStatus.OPEN and (first is None or opening.tasks >= first.tasks)
        if await self._collection(TASK).find_one({"split": split, "epoch": epoch}, {"_id": 1}) is None:
            return False
        return epoch == 0 or await self._count(split, epoch) == await self._count(split, 0)

    async def _count(self, split: str, epoch: int) -> int:
        return await self._collection(TASK).count_documents({"split": split, "epoch": epoch})


class LoadLease:
    """The lease of an epoch during a load. A load that lost it waits until it is free again, and goes on."""

    def __init__(self, epochs: Epochs, leases: EpochLeases, held: EpochOpening) -> None:
        self._epochs = epochs
        self._leases = leases
        self.held = held

    async def expect(self, missing: int) -> None:
        """Record that ``missing`` tasks are going to be inserted."""
        if missing:
            split, _, epoch = self.held.id.rpartition("/")
            await self._renew(await self._epochs.count(split, int(epoch)) + missing)

    async def renew(self) -> None:
        """Let the lease run anew."""
        await self._renew(None)

    async def _renew(self, expected: int | None) -> None:
        try:
            await self._leases.renew(self.held, expected)
        except LeaseLostError:
            self.held = await self._epochs.wait_for_lease(self.held.id)
            if expected is not None:
                await self._leases.renew(self.held, expected)
