"""Select tasks by pass rate or level (``--task_selection``): prefer groups whose scores will likely differ.

A sampled task may be selected again before its next epoch is opened; its copy for that epoch is inserted
then. ``Task.ease`` marks a task that may be selected again; its copy stores it as ``Task.begun.ease``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pymongo import ASCENDING, DESCENDING, UpdateOne

from agentrl.documents.base import plain
from agentrl.documents.run import ADMISSION, EpochOpening, epoch_key
from agentrl.documents.status import TaskStatus
from agentrl.documents.task import Begin, task_key
from agentrl.scoring.difficulty import (
    LIMIT,
    Trials,
    estimate_ability,
    first_spread_probability,
    pass_probability,
    spread_probability,
    update_ease,
)
from agentrl.store.epochs import unbegun
from agentrl.store.mechanics.connection import Json, Repository
from agentrl.store.names import EPOCH, GATE, TASK

LEVEL = "meta.level"
"""The field of a task with its level, a number; the lowest level is the easiest."""

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
class Estimate:
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
    ordered: Sequence[Option], known: Sequence[Option], estimate: Estimate, first: int, capacity: int
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


def _next_by(waiting: Mapping[str, Sequence[Option]], estimate: Estimate, number: int) -> str:
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
        estimate = Estimate(estimate_ability(recent), tuple(await self._recent({"split": split, "epoch": 0})))
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
        waiting = {"split": split, "status": TaskStatus.CREATED.value, LEVEL: {"$type": "number"}}
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
