"""Open epochs under a lease: select their tasks (``--task_selection``), insert them, open the epoch.

The sources of a mixture have epochs of their own: each begins its next one when its own tasks are begun.

A sampled task may be selected again before its next epoch is opened; its copy for that epoch is inserted
then. ``Task.ease`` marks a task that may be selected again; its copy stores it as ``Task.begun.ease``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pymongo
from pymongo import ASCENDING, DESCENDING, UpdateOne
from pymongo.errors import DuplicateKeyError

from agentrl.base.batches import batches
from agentrl.documents.document import plain
from agentrl.documents.mixture import MixtureSource
from agentrl.documents.run import ADMISSION, EpochOpening, Gate, epoch_key, parse_epoch_key
from agentrl.documents.status import EpochStatus, TaskStatus
from agentrl.documents.task import CONTENT, Begin, Slot, Task, task_key
from agentrl.errors import LeaseLostError, StoreError
from agentrl.scoring.evaluation import (
    LIMIT,
    Trials,
    estimate_ability,
    first_spread_probability,
    pass_probability,
    spread_probability,
    update_ease,
)
from agentrl.store.mechanics.blobs import CHECKSUMS
from agentrl.store.mechanics.connection import (
    EPOCH,
    GATE,
    TASK,
    Connection,
    Json,
    Repository,
    database_call,
    id_prefix,
)
from agentrl.store.mechanics.lease import FREE, DocumentLease, literal

LEVEL = "meta.level"
"""The field of a task with its level, a number; the lowest level is the easiest."""
ANY_LEVEL = {"$gte": -math.inf}
"""Matches every level, as the filter of its partial indexes does; a test of the type has no exact bounds."""

MASTERED_RATE = 0.8
"""Mean pass rate of recent groups of a level from which on the next level begins."""

MASTERED_GROUPS = 8
"""Number of recently finalized groups of a level that decide; fewer never do."""

BY_ORDER = [("epoch", ASCENDING), ("order", ASCENDING)]
BY_BEGIN = [("begun.number", ASCENDING), *BY_ORDER]
SLOTS_AT_ONCE = 64
"""Maximum number of slots of one admission; the last group may exceed it."""

ORDERED_EVERY = 4
"""Every N-th group is the next in order, so that every task gets sampled."""

GAIN = 0.05
"""Minimum gain in the probability of differing scores to prefer a known task to the next in order."""

RECENT_GROUPS = 16
"""Number of recently finalized groups, and of recent first groups of tasks, that the estimates use."""

ORDER, PASS_RATE, CURRICULUM = "order", "pass_rate", "curriculum"

OF_SOURCES: Json = {"source": {"$gt": ""}}
"""The filter of the partial indexes of tasks of a mixture."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Select tasks by pass rate. No task is sampled more than ``epochs`` times.

    With ``by_level``, tasks are selected in order, from the level of the curriculum only.
    """

    epochs: int
    by_level: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A group that may be begun next: a task in one epoch."""

    id: str
    task_id: str
    epoch: int
    generations: int
    ease: float
    before: str | None
    """``_id`` of the same task in the previous epoch; None for a new task."""


@dataclass(frozen=True, slots=True)
class RateEstimate:
    """Estimates from recently finalized groups."""

    ability: float
    first: tuple[Trials, ...] = ()
    """Results of recent first groups of tasks."""

    def spread(self, option: Option) -> float:
        """Return the probability that the scores of the group differ."""
        if option.before is None:
            return first_spread_probability(self.first, self.ability, option.generations)
        return spread_probability(pass_probability(self.ability, option.ease), option.generations)


@dataclass(frozen=True, slots=True)
class Choice:
    """A selected group; ``by`` is ``ORDER`` or ``PASS_RATE``."""

    option: Option
    by: str


def choose(
    ordered: Sequence[Option], known: Sequence[Option], estimate: RateEstimate, first: int, capacity: int
) -> list[Choice]:
    """Choose up to ``capacity`` groups or ``SLOTS_AT_ONCE`` slots; their numbers start at ``first``.

    ``ordered`` are the next tasks in order. ``known`` are tasks to sample again, by descending probability of
    differing scores.
    """
    chosen: list[Choice] = []
    waiting = {ORDER: list(ordered), PASS_RATE: list(known)}
    slots = 0
    while len(chosen) < capacity and slots < SLOTS_AT_ONCE and any(waiting.values()):
        by = _next_by(waiting, estimate, first + len(chosen))
        option = waiting[by][0]
        slots += option.generations
        chosen.append(Choice(option, by))
        waiting = {name: [o for o in options if o.id != option.id] for name, options in waiting.items()}
    return chosen


def _next_by(waiting: Mapping[str, Sequence[Option]], estimate: RateEstimate, number: int) -> str:
    ordered, known = waiting[ORDER], waiting[PASS_RATE]
    if not ordered or not known:
        return ORDER if ordered else PASS_RATE
    is_better = estimate.spread(known[0]) >= estimate.spread(ordered[0]) + GAIN
    return PASS_RATE if is_better and number % ORDERED_EVERY else ORDER


def ease_after_group(begun: Begin, summary: Mapping[str, Any]) -> float:
    """Return the ease of a task, updated by the pass rate of its group."""
    scored, rate = summary.get("scored") or 0, summary.get("pass_rate") or 0.0
    return update_ease(Trials(scored, rate * scored, begun.ease), begun.ability)


def sort_key(task: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the sort key of a Task in the order in which groups are begun."""
    return (task.get("begun") or {}).get("number") or 0, task["epoch"], task["order"]


class TaskSelection(Repository):
    """Selects and begins groups in the transaction of an admission."""

    async def any_left(self, split: str, selection: Selection, excluded: Json) -> bool:
        """Return whether a group may be begun that matches ``excluded``, a filter.

        Clears ``ease`` of tasks whose next copy has been begun.
        """
        if await self._ordered(split, 1, excluded):
            return True
        if selection.by_level:
            return False
        known, begun = await self._known(split, selection, 0.0, 1, excluded)
        while begun and not known:
            await self._collection(TASK).update_many({"_id": {"$in": begun}}, {"$set": {"ease": None}})
            known, begun = await self._known(split, selection, 0.0, 1, excluded)
        return bool(known)

    async def begin(self, split: str, selection: Selection, capacity: int, excluded: Json) -> list[str]:
        """Choose up to ``capacity`` groups, insert missing copies, number the groups; return their ids.

        All of them match ``excluded``, a filter. Their status stays ``created``; the admission changes it.
        """
        if capacity <= 0:
            return []
        gate = await self._collection(GATE).find_one({"_id": ADMISSION}) or {}
        first = int(gate.get("begun") or 0) + 1
        recent = await self._recent({"split": split})
        estimate = RateEstimate(
            estimate_ability(recent), tuple(await self._recent({"split": split, "epoch": 0}))
        )
        count = min(capacity, SLOTS_AT_ONCE)
        level = await self._level(split) if selection.by_level else None
        ordered = await self._ordered(split, count, excluded, level)
        known: list[Option] = []
        if not selection.by_level:
            known, _ = await self._known(split, selection, -estimate.ability, count, excluded)
        chosen = choose(ordered, known, estimate, first, capacity)
        if not chosen:
            return []
        await self._insert_copies(split, [choice.option for choice in chosen])
        begins = {
            choice.option.id: Begin(
                number=first + i, by=choice.by, ability=estimate.ability, ease=choice.option.ease
            )
            for i, choice in enumerate(chosen)
        }
        tasks, before = self._collection(TASK), [choice.option.before for choice in chosen]
        await tasks.bulk_write(
            [UpdateOne({"_id": key}, {"$set": {"begun": plain(begin)}}) for key, begin in begins.items()],
        )
        marked = {"_id": {"$in": [key for key in before if key is not None]}, "ease": {"$ne": None}}
        await tasks.update_many(marked, {"$set": {"ease": None}})
        await self._collection(GATE).update_one({"_id": ADMISSION}, {"$inc": {"begun": len(begins)}})
        return list(begins)

    async def _level(self, split: str) -> float | None:
        """Return the lowest level with tasks that are not begun and that is not mastered.

        If all are mastered, the highest such level; None if no such task has a level. It is read from stored
        results, so every sampler finds the same, also after a restart.
        """
        waiting = {"split": split, "status": TaskStatus.CREATED.value, LEVEL: ANY_LEVEL}
        levels = sorted(await self._collection(TASK).distinct(LEVEL, waiting))
        for level in levels:
            decided = {"group.finalized_at": {"$ne": None}, "group.scored": {"$gt": 0}}
            recent = self._collection(TASK).find(
                {"split": split, LEVEL: level, **decided}, {"group.pass_rate": 1},
                sort=[("group.finalized_at", DESCENDING)], limit=MASTERED_GROUPS,
            )  # fmt: skip
            rates = [task["group"].get("pass_rate") or 0.0 async for task in recent]
            if len(rates) < MASTERED_GROUPS or fmean(rates) < MASTERED_RATE:
                return float(level)
        return float(levels[-1]) if levels else None

    async def _recent(self, query: Json) -> list[Trials]:
        """Return the results of the groups of ``query`` that were finalized last."""
        recent = self._collection(TASK).find(
            # Name the range of the partial index: MongoDB uses it only for a query that implies its filter.
            {**query, "begun.number": {"$gt": 0}, "group.finalized_at": {"$ne": None}},
            {"group.scored": 1, "group.pass_rate": 1, "begun.ease": 1},
            sort=[("group.finalized_at", DESCENDING)], limit=RECENT_GROUPS,
        )  # fmt: skip
        return [
            Trials(task["group"]["scored"], task["group"]["scored"] * task["group"]["pass_rate"],
                   task["begun"]["ease"])
            async for task in recent
            if task["group"]["scored"]
        ]  # fmt: skip

    async def _ordered(
        self, split: str, count: int, excluded: Json, level: float | None = None
    ) -> list[Option]:
        """Return the next tasks in order, of one ``level`` if it is given, whose groups are not begun."""
        own: Json = {} if level is None else {LEVEL: level}
        query = {"split": split, "status": TaskStatus.CREATED.value, **own, **excluded}
        created = await self._collection(TASK).find(query, _SHOWN, sort=BY_ORDER, limit=count).to_list()
        before = {task["_id"]: _key(split, task, -1) for task in created if task["epoch"]}
        marked = self._collection(TASK).find(
            {"_id": {"$in": list(before.values())}, "ease": {"$ne": None}}, {"ease": 1}
        )
        eases = {task["_id"]: task["ease"] async for task in marked} if before else {}
        return [_option(t, t["_id"], t["epoch"], before.get(t["_id"]), eases) for t in created]

    async def _known(
        self, split: str, selection: Selection, target: float, count: int, excluded: Json
    ) -> tuple[list[Option], list[str]]:
        """Return known tasks with an ease near ``target``, and the ids of tasks that are begun again."""
        query: Json = {
            "split": split, "status": TaskStatus.COMPLETED.value, "epoch": {"$lt": selection.epochs - 1},
            **excluded,
        }  # fmt: skip
        easier, harder = [
            await self._collection(TASK).find(
                {**query, "ease": bound}, {**_SHOWN, "ease": 1},
                sort=[("ease", direction), ("_id", direction)], limit=count,
            ).to_list()
            for bound, direction in (
                # Bound both by -LIMIT, the filter of the partial index, which serves no other query.
                ({"$gte": max(target, -LIMIT)}, ASCENDING), ({"$lt": target, "$gte": -LIMIT}, DESCENDING),
            )
        ]  # fmt: skip
        nearest = sorted(easier + harder, key=lambda task: (abs(task["ease"] - target), task["_id"]))[:count]
        copies = {task["_id"]: _key(split, task, 1) for task in nearest}
        begun = {"_id": {"$in": list(copies.values())}, "status": {"$ne": TaskStatus.CREATED.value}}
        taken = set(await self._ids(TASK, begun)) if copies else set()
        known = [
            _option(task, copies[task["_id"]], task["epoch"] + 1, task["_id"], {task["_id"]: task["ease"]})
            for task in nearest
            if copies[task["_id"]] not in taken
        ]
        return known, [key for key, copy in copies.items() if copy in taken]

    async def _insert_copies(self, split: str, options: Sequence[Option]) -> None:
        """Insert the missing Tasks of ``options``, and a document for each epoch without one."""
        tasks = self._collection(TASK)
        ids = {"_id": {"$in": [option.id for option in options]}}
        stored = set(await self._ids(TASK, ids))
        missing = [option for option in options if option.id not in stored]
        if not missing:
            return
        before = {"$match": {"_id": {"$in": [option.before for option in missing]}}}
        copy = {"$replaceWith": unbegun({"$range": [0, {"$size": "$slots"}]}, {"$add": ["$epoch", 1]})}
        # Fetch and insert the copies: MongoDB refuses $merge in a transaction.
        await tasks.insert_many(await self._aggregate(TASK, before, copy))
        keys = {epoch_key(split, option.epoch) for option in missing}
        keys -= set(await self._ids(EPOCH, {"_id": {"$in": sorted(keys)}}))
        if keys:
            openings = [EpochOpening(id=key).to_document() for key in sorted(keys)]
            await self._collection(EPOCH).insert_many(openings)


_SHOWN: Json = {"task_id": 1, "epoch": 1, "generations": {"$size": "$slots"}}


def _key(split: str, task: Json, offset: int) -> str:
    """Return the ``_id`` of the same task in another epoch."""
    return task_key(split, task["epoch"] + offset, task["task_id"])


def _option(task: Json, key: str, epoch: int, before: str | None, eases: Mapping[str, float]) -> Option:
    return Option(
        id=key, task_id=task["task_id"], epoch=epoch, generations=task["generations"],
        ease=eases.get(before or "", 0.0), before=before,
    )  # fmt: skip


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
    async def by_source(self, split: str) -> dict[str | None, dict[int, EpochOpening]]:
        """Return the openings of a split by source and epoch; under None those that no source has."""
        return await openings_of(self._connection, split)

    async def by_split(self, split: str) -> dict[int, EpochOpening]:
        """Return the openings of a split by epoch, without those of sources."""
        return (await self.by_source(split)).get(None, {})

    @database_call
    async def count_sources(self, split: str, counts: Mapping[str, int]) -> None:
        """Store how many tasks of epoch 0 each source has; a source without a document gets one."""
        for source, count in counts.items():
            made = EpochOpening(id=epoch_key(split, 0, source), status=EpochStatus.OPEN).to_document()
            del made["tasks"]
            counted = {"$set": {"tasks": count}, "$setOnInsert": made}
            await self._collection(EPOCH).update_one({"_id": made.pop("_id")}, counted, upsert=True)

    @database_call
    async def acquire(self, opening: EpochOpening, *, copies: bool = False) -> EpochOpening | None:
        """Acquire the lease; return None if another process holds it.

        A stored seed, shuffle flag and number of generations are kept. With ``copies`` the caller copies
        epoch 0, which has ``opening.tasks`` tasks; an open epoch with as many tasks then also returns None.
        """
        made = replace(opening, tasks=0).to_document()
        key = made.pop("_id")
        # Ignore a duplicate: MongoDB may raise it for one of two upserts of the same id.
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
    async def finish(
        self, held: EpochOpening, tasks: int, set_aside: Mapping[str, int] | None = None
    ) -> None:
        """Mark the epoch as open, with ``tasks`` tasks, and release the lease."""
        opened = {"status": EpochStatus.OPEN.value, "tasks": tasks, **FREE}
        if set_aside:
            opened["set_aside"] = literal(dict(set_aside))
        await self._lease(held).write(held.attempt, [{"$set": opened}])

    @asynccontextmanager
    async def releasing(self, held: EpochOpening) -> AsyncIterator[None]:
        """Release the lease after an error, so that the next process need not wait for its expiry."""
        try:
            yield
        except BaseException:
            # Bound the write and ignore its failure: the block's error matters, and the lease expires.
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

    async def next(self, split: str, epochs: int, source: str | None = None) -> int | None:
        """Return the lowest epoch to open, of the first ``epochs`` and those begun; None if all are open."""
        return following_epoch((await self._leases.by_source(split)).get(source, {}), epochs)

    async def due(self, split: str, epochs: int) -> list[tuple[str | None, int]]:
        """Return each source with a next epoch, and which; (None, epoch) for a split without sources."""
        openings = await self._leases.by_source(split)
        whole = openings.pop(None, {})
        # Wait for the load: until it ends, nobody knows which sources there are.
        is_loaded = 0 in whole and whole[0].status is EpochStatus.OPEN
        if not openings or not is_loaded:
            openings = {None: whole}
        following = {source: following_epoch(each, epochs) for source, each in openings.items()}
        return [(source, epoch) for source, epoch in following.items() if epoch is not None]

    @database_call
    async def size(self, split: str) -> int:
        """Return the number of tasks per epoch; during the first load, the number that it will have."""
        before = (await self._leases.by_split(split)).get(0)
        if before is not None:
            return before.tasks
        loaded = await self.count(split, 0)
        begun = (await self._leases.by_split(split)).get(0)  # a load that began meanwhile: some are counted
        return loaded if begun is None else begun.tasks

    @database_call
    async def open(
        self, split: str, epoch: int, seed: int, num_generations: int, shuffle: bool = True, *,
        source: str | None = None,
    ) -> int:  # fmt: skip
        """Copy the tasks of epoch 0, or those of ``source``, to ``epoch``; return how many were missing.

        They are in a new order, without those that the source's pools set aside. Writes nothing while an
        earlier epoch is not open, or while another process opens this one.
        """
        if epoch == 0 or await self.next(split, epoch + 1, source) != epoch:
            return 0
        loaded = await self.count(split, 0, source)
        begun = await self._one(Task, TASK, _of_epoch(split, epoch, source))
        opening = EpochOpening(
            id=epoch_key(split, epoch, source), tasks=loaded, seed=seed, shuffle=shuffle,
            # Take the size of a group that is there: a selection copies tasks before their epoch is opened.
            num_generations=num_generations if begun is None else len(begun.slots) + begun.retracted,
        )  # fmt: skip
        async with self._leases.lock(opening.id):
            held = await self._leases.acquire(opening, copies=True)
            if held is None:
                return 0
            try:
                async with self._leases.releasing(held):
                    return await self._copy(split, epoch, held, source)
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
                if epoch == 0:
                    await self._leases.count_sources(split, await self._sources(split))
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
    async def count(self, split: str, epoch: int, source: str | None = None) -> int:
        """Return how many tasks an epoch holds now, or an epoch of a source."""
        return await self._collection(TASK).count_documents(_of_epoch(split, epoch, source))

    @database_call
    async def _sources(self, split: str) -> dict[str, int]:
        """Return how many tasks of epoch 0 each source has."""
        return await self._count_by("source", TASK, {"split": split, "epoch": 0, **OF_SOURCES})

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

    async def _copy(self, split: str, epoch: int, held: EpochOpening, source: str | None) -> int:
        tasks = self._collection(TASK)
        cursor = tasks.find(_of_epoch(split, 0, source), {"_id": 0, "order": 1, "task_id": 1})
        # Sort first: a process that takes over must shuffle the same list by the same seed.
        loaded = sorted([(task["order"], task["task_id"]) async for task in cursor])
        ordered = [task_id for _, task_id in loaded]
        if held.shuffle:
            random.Random(f"{held.seed}/{epoch}").shuffle(ordered)
        present = set(await self._ids(TASK, {"_id": id_prefix(f"{epoch_key(split, epoch, source)}/")}))
        missing = [
            (order, task_id)
            for order, task_id in enumerate(ordered)
            if task_key(split, epoch, task_id) not in present
        ]
        aside: dict[str, str] = {}
        if source is not None:
            aside = await self._set_aside(split, epoch, source, [task_id for _, task_id in missing])
            missing = [(order, task_id) for order, task_id in missing if task_id not in aside]
        for batch in batches(missing, _BATCH):
            await self._copy_batch(split, epoch, batch, held.num_generations or 1)
            # Renew after each batch: a process that lost the lease ends here, and its copies harm nobody.
            await self._leases.renew(held)
        held_now = await self.count(split, epoch, source)
        await self._leases.finish(held, held_now + len(aside), Counter(aside.values()))
        return len(missing)

    async def _set_aside(
        self, split: str, epoch: int, source: str, task_ids: Sequence[str]
    ) -> dict[str, str]:
        """Return {task: pool} of those of ``task_ids``, in their order, that the source's pools leave out.

        The pool of a task is that of its last finalized group before ``epoch``. A task without one is kept.
        """
        gate = await self._one(Gate, GATE, {"_id": ADMISSION})
        pooled = [each for each in gate.sources if each.name == source and each.pools] if gate else []
        if not pooled:
            return {}
        scored = {"group.finalized_at": {"$ne": None}, "group.scored": {"$gt": 0}}
        cursor = self._collection(TASK).find(
            {"split": split, "source": source, "epoch": {"$lt": epoch}, **scored},
            {"_id": 0, "task_id": 1, "epoch": 1, "group.pass_rate": 1},
        )
        found = sorted(
            [(task["epoch"], task["task_id"], task["group"]["pass_rate"]) async for task in cursor]
        )
        return set_aside(pooled[0], task_ids, {task_id: rate for _, task_id, rate in found})

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


def following_epoch(openings: Mapping[int, EpochOpening], epochs: int) -> int | None:
    """Return the lowest epoch to open, of the first ``epochs`` and those begun; None if all are open.

    None too after an epoch that has set every task aside: the next one would do the same.
    """
    least = openings[0].tasks if 0 in openings else 0
    for epoch in range(max(epochs, max(openings, default=0) + 1)):
        opening = openings.get(epoch)
        if opening is None and epoch and sum(openings[epoch - 1].set_aside.values()) >= max(least, 1):
            return None
        if opening is None or opening.status is not EpochStatus.OPEN or opening.tasks < least:
            return epoch
    return None


def set_aside(source: MixtureSource, task_ids: Sequence[str], rates: Mapping[str, float]) -> dict[str, str]:
    """Return {task: pool} of the tasks that an epoch leaves out; ``rates`` are their last pass rates.

    Of each pool its weight's share is kept, evenly over ``task_ids``: of a weight of 0.2 every fifth.
    """
    met: Counter[str] = Counter()
    aside: dict[str, str] = {}
    for task_id in task_ids:
        if task_id not in rates:
            continue
        pool = source.pool_of(rates[task_id])
        # Round: 0.29 × 100 is below 29 as a float.
        before, after = (math.floor(round(pool.weight * (met[pool.name] + n), 9)) for n in (0, 1))
        met[pool.name] += 1
        if after == before:
            aside[task_id] = pool.name
    return aside


async def openings_of(connection: Connection, split: str) -> dict[str | None, dict[int, EpochOpening]]:
    """Return the openings of a split by source and epoch; under None those that no source has."""
    found: dict[str | None, dict[int, EpochOpening]] = {}
    async for document in connection.collection(EPOCH).find({"_id": id_prefix(f"{split}/")}):
        own, epoch, source = parse_epoch_key(document["_id"])
        if own == split:
            found.setdefault(source, {})[epoch] = EpochOpening.from_document(document)
    return found


def _of_epoch(split: str, epoch: int, source: str | None) -> Json:
    """Return a filter for the tasks of an epoch, or of an epoch of a source."""
    own: Json = {} if source is None else {"source": source}
    return {"split": split, "epoch": epoch, **own}


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
    # Copy only what was loaded: everything else of the source is the state of its own group.
    kept = ("_id", "task_id", "split", "epoch", "order", "source", *CONTENT, CHECKSUMS)
    copy = {name: literal(value) for name, value in new.items()} | {name: f"${name}" for name in kept}
    if epoch is not None:
        copy["_id"] = {"$concat": ["$split", "/", {"$toString": epoch}, "/", "$task_id"]}
        copy["epoch"] = epoch
    slot = {"$mergeObjects": [literal(Slot(traj_id=0).to_document()), {"traj_id": "$$number"}]}
    slots = {"$map": {"input": traj_ids, "as": "number", "in": slot}}
    return {**copy, "slots": slots, "created_at": "$$NOW", "updated_at": "$$NOW"}
