"""Open epochs: one process at a time, under a lease, inserts an epoch's tasks; then the epoch is open."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pymongo
from pymongo.errors import DuplicateKeyError

from agentrl.batches import batches
from agentrl.documents.run import EpochOpening, epoch_key
from agentrl.documents.status import EpochStatus
from agentrl.documents.task import CONTENT, Slot, Task, task_key
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store.mechanics.blobs import CHECKSUMS
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call, id_prefix
from agentrl.store.mechanics.lease import FREE, DocumentLease, literal
from agentrl.store.names import EPOCH, TASK

logger = logging.getLogger(__name__)

LOAD_WAIT_SECONDS = 600.0
"""How long a load waits for another process that loads the same split."""

_BATCH = 1000
_POLL_SECONDS = 0.25
_RELEASE_SECONDS = 2.0
_PLAN = ("seed", "shuffle", "num_generations")
"""Fields that the first owner sets; a process that takes over uses the stored values."""


class EpochLeases(Repository):
    """The lease of each epoch, in its ``EpochOpening`` document; times are the server's.

    All leases of one instance have the same owner.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._owner = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._seconds = 2 * connection.timeout + 10
        self._locks: dict[str, asyncio.Lock] = {}

    def lock(self, key: str) -> asyncio.Lock:
        """Return the lock that serializes the openers of this process, which share the owner's name."""
        return self._locks.setdefault(key, asyncio.Lock())

    @database_call
    async def by_split(self, split: str) -> dict[int, EpochOpening]:
        """Return the openings of a split by epoch."""
        openings = await self._all(EpochOpening, EPOCH, {"_id": id_prefix(f"{split}/")})
        numbered = {int(opening.id.rpartition("/")[2]): opening for opening in openings}
        return {number: each for number, each in numbered.items() if each.id == epoch_key(split, number)}

    @database_call
    async def acquire(self, opening: EpochOpening, *, copies: bool = False) -> EpochOpening | None:
        """Acquire the lease; return None if another process holds it.

        A stored seed, shuffle flag and number of generations are kept. With ``copies`` the caller copies
        epoch 0, which has ``opening.tasks`` tasks; an open epoch with as many tasks then also returns None.
        """
        made = replace(opening, tasks=0).to_document()
        key = made.pop("_id")
        with suppress(DuplicateKeyError):
            await self._collection(EPOCH).update_one({"_id": key}, {"$setOnInsert": made}, upsert=True)
        fields: Json = {name: {"$ifNull": [f"${name}", getattr(opening, name)]} for name in _PLAN}
        only_if = None
        if copies:
            is_opening = {"$eq": ["$status", EpochStatus.OPENING.value]}
            only_if = {"$or": [is_opening, {"$lt": ["$tasks", opening.tasks]}]}
            fields |= {"status": EpochStatus.OPENING.value, "tasks": opening.tasks}
        document = await self._lease(opening).take(self._owner, self._seconds, fields, only_if=only_if)
        return None if document is None else EpochOpening.from_document(document)

    @database_call
    async def renew(self, held: EpochOpening, expected: int | None = None) -> None:
        """Extend the lease; with ``expected``, also mark the epoch as opening, to hold that many tasks.

        Raises LeaseLostError if another process has acquired the lease.
        """
        opening = None if expected is None else {"status": EpochStatus.OPENING.value, "tasks": expected}
        await self._lease(held).renew(held.attempt, self._seconds, opening)

    @database_call
    async def finish(self, held: EpochOpening, tasks: int) -> None:
        """Mark the epoch as open, with ``tasks`` tasks, and release the lease."""
        opened = {"status": EpochStatus.OPEN.value, "tasks": tasks, **FREE}
        await self._lease(held).write(held.attempt, [{"$set": opened}])

    @asynccontextmanager
    async def releasing(self, held: EpochOpening) -> AsyncIterator[None]:
        """Release the lease after an error, so that the next process need not wait for its expiry."""
        try:
            yield
        except BaseException:
            with suppress(pymongo.errors.PyMongoError, StoreError), pymongo.timeout(_RELEASE_SECONDS):
                await self._lease(held).write(held.attempt, [{"$set": FREE}])
            raise

    def _lease(self, opening: EpochOpening) -> DocumentLease:
        def lost(attempt: int) -> LeaseLostError:
            return LeaseLostError(
                f"another process opens epoch {opening.id}: the lease of {self._owner} ran out",
                hint="nothing is lost: the other process inserts the missing tasks",
            )

        return DocumentLease(self._collection(EPOCH), opening.id, lost)


class Epochs(Repository):
    """Opens epochs. Epoch 0 holds the tasks of the file; each later epoch is a copy of it.

    The collection ``Epoch`` has one document per epoch: whether it is open, and which process inserts its
    tasks. A task may be claimed as soon as it is inserted. If the owner dies, another process takes over and
    inserts only the missing tasks. Tasks that are loaded later join every epoch: an epoch with fewer tasks
    than epoch 0 is opened again.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._leases = EpochLeases(connection)

    @database_call
    async def next(self, split: str, epochs: int) -> int | None:
        """Return the lowest epoch to open, of the first ``epochs`` and those begun; None if all are open."""
        openings = await self._leases.by_split(split)
        least = openings[0].tasks if 0 in openings else 0
        for epoch in range(max(epochs, max(openings, default=0) + 1)):
            opening = openings.get(epoch)
            if opening is None or opening.status is not EpochStatus.OPEN or opening.tasks < least:
                return epoch
        return None

    @database_call
    async def size(self, split: str) -> int:
        """Return the number of tasks per epoch; during the first load, the number that it will have."""
        first = (await self._leases.by_split(split)).get(0)
        return await self.count(split, 0) if first is None else first.tasks

    @database_call
    async def open(
        self, split: str, epoch: int, seed: int, num_generations: int, shuffle: bool = True
    ) -> int:
        """Copy the tasks of epoch 0 to ``epoch``, in a new order; return how many were missing.

        Writes nothing while an earlier epoch is not open, or while another process opens this one.
        """
        if epoch == 0 or await self.next(split, epoch + 1) != epoch:
            return 0
        loaded = await self.count(split, 0)
        begun = await self._one(Task, TASK, {"split": split, "epoch": epoch})
        opening = EpochOpening(
            id=epoch_key(split, epoch), tasks=loaded, seed=seed, shuffle=shuffle,
            num_generations=num_generations if begun is None else len(begun.slots) + begun.retracted,
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
        """Hold the lease of an epoch while its tasks are inserted from a file; then mark the epoch as open.

        Waits for another process that holds it, for up to ``LOAD_WAIT_SECONDS``.
        """
        key = epoch_key(split, epoch)
        async with self._leases.lock(key):
            earlier = (await self._leases.by_split(split)).get(epoch)
            held = await self.wait_for_lease(key)
            async with self._leases.releasing(held):
                lease = LoadLease(self, self._leases, held)
                yield lease
                tasks = await self.count(split, epoch)
                await self._leases.finish(lease.held, tasks)
        if earlier is not None and earlier.status is EpochStatus.OPENING and earlier.tasks > tasks:
            logger.warning(
                "an earlier load of split %s was interrupted: it expected %d tasks, and there are %d now;"
                " if it read another file, load that file again", split, earlier.tasks, tasks,
            )  # fmt: skip

    async def is_loaded(self, split: str, epoch: int) -> bool:
        """Return whether the last load of the epoch finished; False if no load is recorded."""
        opening = (await self._leases.by_split(split)).get(epoch)
        return opening is not None and opening.status is EpochStatus.OPEN

    @database_call
    async def count(self, split: str, epoch: int) -> int:
        """Return how many tasks an epoch holds now."""
        return await self._collection(TASK).count_documents({"split": split, "epoch": epoch})

    async def wait_for_lease(self, key: str) -> EpochOpening:
        """Wait until the lease of an epoch is free, and acquire it for a load."""
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
        loaded = sorted([(task["order"], task["task_id"]) async for task in cursor])
        ordered = [task_id for _, task_id in loaded]
        if held.shuffle:
            random.Random(f"{held.seed}/{epoch}").shuffle(ordered)
        present = set(await self._ids(TASK, {"_id": id_prefix(f"{split}/{epoch}/")}))
        missing = [
            (order, task_id)
            for order, task_id in enumerate(ordered)
            if task_key(split, epoch, task_id) not in present
        ]
        for batch in batches(missing, _BATCH):
            await self._copy_batch(split, epoch, batch, held.num_generations or 1)
            await self._leases.renew(held)
        await self._leases.finish(held, await self.count(split, epoch))
        return len(missing)

    async def _copy_batch(
        self, split: str, epoch: int, ordered: Sequence[tuple[int, str]], generations: int
    ) -> None:
        """Copy tasks, given as (order, task_id), inside the server; tasks that exist are not changed."""
        ids = [task_id for _, task_id in ordered]
        orders = literal([order for order, _ in ordered])
        order = {"$arrayElemAt": [orders, {"$indexOfArray": [literal(ids), "$task_id"]}]}
        await self._aggregate(
            TASK,
            {"$match": {"_id": {"$in": [task_key(split, 0, task_id) for task_id in ids]}}},
            {"$replaceWith": unbegun(list(range(generations)), literal(epoch)) | {"order": order}},
            {"$merge": {"into": TASK, "whenMatched": "keepExisting", "whenNotMatched": "insert"}},
        )


class LoadLease:
    """The lease of an epoch during a load. A load that loses it waits until it is free, then continues."""

    def __init__(self, epochs: Epochs, leases: EpochLeases, held: EpochOpening) -> None:
        self._epochs = epochs
        self._leases = leases
        self.held = held

    async def expect(self, missing: int) -> None:
        """Record that ``missing`` tasks are going to be inserted."""
        if missing:
            split, _, epoch = self.held.id.rpartition("/")
            await self.renew(await self._epochs.count(split, int(epoch)) + missing)

    async def renew(self, expected: int | None = None) -> None:
        """Extend the lease; with ``expected``, also record that the epoch is to hold that many tasks."""
        try:
            await self._leases.renew(self.held, expected)
        except LeaseLostError:
            self.held = await self._epochs.wait_for_lease(self.held.id)
            if expected is not None:
                await self._leases.renew(self.held, expected)


def unbegun(traj_ids: Any, epoch: Any = None) -> Json:
    """Return the expression of a copy of a Task whose slots ``traj_ids`` nobody has claimed.

    It is the copy for ``epoch``, by default for the epoch of the Task. Both are expressions over the Task.
    """
    new = Task(id="", task_id="", split="", epoch=0, order=0, query="").to_document()
    kept = ("_id", "task_id", "split", "epoch", "order", *CONTENT, CHECKSUMS)
    copy = {name: literal(value) for name, value in new.items()} | {name: f"${name}" for name in kept}
    if epoch is not None:
        copy["_id"] = {"$concat": ["$split", "/", {"$toString": epoch}, "/", "$task_id"]}
        copy["epoch"] = epoch
    slot = {"$mergeObjects": [literal(Slot(traj_id=0).to_document()), {"traj_id": "$$number"}]}
    slots = {"$map": {"input": traj_ids, "as": "number", "in": slot}}
    return {**copy, "slots": slots, "created_at": "$$NOW", "updated_at": "$$NOW"}
