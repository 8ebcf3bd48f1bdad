"""The mixture of a run: store its sources, give each group to one of them, open their gates."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from pymongo import DESCENDING, UpdateOne

from agentrl.documents.document import now, plain
from agentrl.documents.mixture import MIXED_SPLIT, GateOpening, MixtureSource, SourceGate, Turns
from agentrl.documents.run import ADMISSION, EpochOpening, Gate
from agentrl.documents.status import EpochStatus, TaskStatus, values
from agentrl.documents.task import CONVERSATIONS, Begin
from agentrl.errors import TaskFileError
from agentrl.store.epochs import (
    BY_ORDER,
    ORDER,
    SLOTS_AT_ONCE,
    following_epoch,
    openings_of,
)
from agentrl.store.mechanics.connection import GATE, TASK, Connection, Json, Repository, database_call

logger = logging.getLogger(__name__)

_SHOWN_GROUPS = 64
"""Groups of a source whose pass rate is shown."""
_ALMOST = 1e-9
"""A mean of pass rates may miss its bound by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """How far a source of a mixture is, for people."""

    name: str
    weight: float
    target: float
    """Its share of the weights of the open sources; 0 while its gate is closed."""
    begun: int
    share: float
    """Its share of all groups that were begun."""
    tasks: int
    epoch: int
    """Its last epoch that was opened."""
    set_aside: Mapping[str, int]
    """Pool → tasks that this epoch leaves out."""
    pass_rate: float | None
    """Mean over its last groups, at most 64; None before any is scored."""
    is_open: bool
    why: str
    """Why its gate is open or closed; empty without a gate."""


class Mixtures(Repository):
    """The calls on the stored sources."""

    @database_call
    async def sources(self) -> tuple[MixtureSource, ...]:
        """Return the sources of the run, in the order of their file; empty without a mixture."""
        return await self._sources()

    async def _sources(self) -> tuple[MixtureSource, ...]:
        gate = await self._one(Gate, GATE, {"_id": ADMISSION})
        return () if gate is None else gate.sources

    @database_call
    async def check(
        self, sources: Sequence[MixtureSource], *, update: bool = False, append: bool = True
    ) -> bool:
        """Return whether the run has a mixture; ``sources`` are those of its file, none of another file.

        Raises TaskFileError if the run has other sources, or tasks of none. With ``update``, weights, gates
        and pools may differ; with ``append``, the file may have more sources.
        """
        stored = {each.name: each for each in await self._sources()}
        if stored and not sources:
            raise TaskFileError(
                "the tasks of the run are a mixture, and this file is none",
                hint="add it to the mixture's file as one more source, and load that with --append",
            )
        if sources and not stored and await self._any_plain():
            raise TaskFileError(
                "the run has tasks that belong to no source: a mixture would never sample them",
                hint="begin a run with the mixture: --run_name NAME",
            )
        given = {each.name: each for each in sources}
        if missing := stored.keys() - given.keys():
            raise TaskFileError(
                f"the run has {_listed(missing)}, and the mixture's file has not",
                hint="keep them: a source that has begun cannot be taken away; a low weight keeps it small",
            )
        new = given.keys() - stored.keys()
        if stored and new and not append:
            raise TaskFileError(
                f"the run does not have {_listed(new)} of the mixture's file",
                hint="agentrl tasks load FILE --append adds what is new",
            )
        differing = [
            line for name in stored if name in given for line in _differences(stored[name], given[name])
        ]
        if differing and not update:
            raise TaskFileError(
                "the run has another mixture (stored → in the file):\n  " + "\n  ".join(differing),
                hint="load the file that the run was begun with, or change the run: agentrl tasks load FILE"
                " --update",
            )
        return bool(stored)

    @database_call
    async def unreachable(self, epochs: int) -> list[str]:
        """Return a line for each gate that waits for more groups than its source has in ``epochs`` epochs."""
        openings = await openings_of(self._connection, MIXED_SPLIT)
        return [
            f"the gate of source {each.name} waits for {gate.groups} groups of {gate.source}, which has"
            f" {loaded[0].tasks} tasks and {epochs} epochs: it will open when nothing else is left to sample"
            for each in await self._sources()
            if (gate := each.gate) is not None
            and 0 in (loaded := openings.get(gate.source, {}))
            and loaded[0].tasks * epochs < gate.groups
        ]

    @database_call
    async def write(self, sources: Sequence[MixtureSource]) -> None:
        """Store the sources; those that are stored keep what was begun and opened. Idempotent."""

        async def write() -> None:
            gate = await self._one(Gate, GATE, {"_id": ADMISSION}) or Gate()
            stored = {each.name: each for each in gate.sources}
            # Keep the stored order: the credits that groups store are by it.
            ordered = sorted(sources, key=lambda new: [*stored, new.name].index(new.name))
            merged = [
                replace(stored.get(new.name, new), weight=new.weight, gate=new.gate, pools=new.pools)
                for new in ordered
            ]
            if merged != [*gate.sources]:
                changed = {"$set": {"sources": plain(merged)}}
                await self._collection(GATE).update_one({"_id": ADMISSION}, changed, upsert=True)

        await self._connection.transaction(write)

    @database_call
    async def states(self) -> list[SourceState]:
        """Return how far each source is; empty without a mixture."""
        sources = await self._sources()
        if not sources:
            return []
        openings = await openings_of(self._connection, MIXED_SPLIT)
        weights = sum(each.weight for each in sources if each.is_open)
        begun = sum(each.begun for each in sources)
        found = []
        for each in sources:
            rates = await pass_rates(self._connection, each.name, _SHOWN_GROUPS)
            epochs = openings.get(each.name, {})
            last = max(epochs, default=0)
            found.append(
                SourceState(
                    name=each.name,
                    weight=each.weight,
                    target=each.weight / weights if each.is_open else 0.0,
                    begun=each.begun,
                    share=each.begun / begun if begun else 0.0,
                    tasks=epochs[0].tasks if 0 in epochs else 0,
                    epoch=last,
                    set_aside=epochs[last].set_aside if epochs else {},
                    pass_rate=fmean(rates) if rates else None,
                    is_open=each.is_open,
                    why=await self._why(each),
                )
            )
        return found

    async def _why(self, source: MixtureSource) -> str:
        gate, opened = source.gate, source.opened
        if gate is None:
            return ""
        if opened is not None:
            rate = "no scored group" if opened.pass_rate is None else f"{opened.pass_rate:.2f}"
            reason = "" if opened.because == "pass_rate" else ", because nothing else was left"
            return f"open since step {opened.after_step}: {gate.source} had {rate}{reason}"
        rates = await pass_rates(self._connection, gate.source, gate.groups)
        has = f"{fmean(rates):.2f} in {len(rates)}" if rates else "none"
        return f"closed: {gate.source} has {has}, and needs {gate.pass_rate:g} in {gate.groups} groups"

    async def _any_plain(self) -> bool:
        plain_task = {"split": MIXED_SPLIT, "epoch": 0, "source": None}
        return await self._collection(TASK).find_one(plain_task, {"_id": 1}) is not None


def _but(chosen: Sequence[tuple[str, object]]) -> Json:
    """Return the filter of Tasks without those that an admission has chosen, which are not begun yet."""
    return {"_id": {"$nin": [key for key, _ in chosen]}}


def _listed(names: Collection[str]) -> str:
    return f"the source{'s' * (len(names) > 1)} {', '.join(sorted(names))}"


def _differences(stored: MixtureSource, new: MixtureSource) -> Iterator[str]:
    for name in ("weight", "gate", "pools"):
        old, value = plain(getattr(stored, name)), plain(getattr(new, name))
        if old != value:
            yield f"{stored.name}.{name} {old} → {value}"


async def pass_rates(connection: Connection, source: str, groups: int) -> list[float]:
    """Return the pass rates of the last finalized groups of a source, newest first, at most ``groups``.

    Groups without a scored trajectory do not count.
    """
    decided = {"group.finalized_at": {"$ne": None}, "group.scored": {"$gt": 0}}
    recent = connection.collection(TASK).find(
        {"split": MIXED_SPLIT, "source": source, **decided}, {"group.pass_rate": 1},
        sort=[("group.finalized_at", DESCENDING)], limit=groups,
    )  # fmt: skip
    return [task["group"]["pass_rate"] async for task in recent]


class MixtureSelection(Repository):
    """Begins groups of a mixture in the transaction of an admission.

    Everything that decides is stored: credits and openings in ``Gate.sources``, pass rates in the Tasks. So
    every sampler gives the next group to the same source, and a restart changes nothing.
    """

    async def any_left(self, epochs: int, excluded: Json) -> bool:
        """Return whether a group that matches ``excluded``, a filter, or a gate may be begun or opened."""
        gate = await self._one(Gate, GATE, {"_id": ADMISSION}) or Gate()
        sources = await self._opened(gate.sources, 0)
        if sources != gate.sources:
            return True
        for source in sources:
            if source.is_open and await self._waiting(source.name, 1, excluded):
                return True
        return bool(await self._last_resort(sources, epochs))

    async def begin(
        self, gate: Gate, step: int, capacity: int, epochs: int, excluded: Json
    ) -> tuple[list[str], bool]:
        """Choose up to ``capacity`` groups that match ``excluded`` and number them; open the gates first.

        ``step`` is the last committed one. Returns their ids, and whether anything was written. Their status
        stays ``created``; the admission changes it.
        """
        if capacity <= 0:
            return [], False
        sources = await self._opened(gate.sources, step)
        chosen, sources = await self._choose(sources, min(capacity, SLOTS_AT_ONCE), epochs, excluded)
        if not chosen and (last_ones := await self._last_resort(sources, epochs, step)):
            chosen, sources = await self._choose(last_ones, min(capacity, SLOTS_AT_ONCE), epochs, excluded)
        if not chosen and sources == gate.sources:
            return [], False
        numbered = [
            (key, Begin(number=number, by=ORDER, ability=0.0, ease=0.0, credits=credits))
            for number, (key, credits) in enumerate(chosen, gate.begun + 1)
        ]
        begins = [UpdateOne({"_id": key}, {"$set": {"begun": plain(begin)}}) for key, begin in numbered]
        if begins:
            await self._collection(TASK).bulk_write(begins)
        for before, after in zip(gate.sources, sources, strict=True):
            if (opened := after.opened) is not None and opened != before.opened:
                is_met = opened.because == "pass_rate"
                more = "" if is_met else ": its gate could not open any more, and nothing else is left"
                why = "source %s opens after step %d%s"
                logger.log(logging.INFO if is_met else logging.WARNING, why, after.name, step, more)
        counted = {"$inc": {"begun": len(begins)}, "$set": {"sources": plain(sources)}}
        await self._collection(GATE).update_one({"_id": ADMISSION}, counted)
        return [key for key, _ in chosen], True

    async def _choose(
        self, sources: Sequence[MixtureSource], count: int, epochs: int, excluded: Json
    ) -> tuple[list[tuple[str, tuple[float, ...]]], tuple[MixtureSource, ...]]:
        """Return the id of each next group with the credits after it, and the sources with these counted."""
        turns = Turns.of(sources)
        active = [each.name for each in sources if each.is_open]
        waiting: dict[str, deque[Json]] = {}
        begun = dict.fromkeys(active, 0)
        chosen: list[tuple[str, tuple[float, ...]]] = []
        slots = 0
        while active and len(chosen) < count and slots < SLOTS_AT_ONCE:
            name = turns.next(active)
            if name not in waiting:
                waiting[name] = deque(await self._waiting(name, count, excluded))
            if waiting[name]:
                task = waiting[name].popleft()
                turns.begin(name, active)
                chosen.append((task["_id"], tuple(turns.credits.values())))
                slots += task["generations"]
                begun[name] += 1
            elif not await self._waiting(name, 1, _but(chosen)) and await self._epoch_is_due(name, epochs):
                # Wait for its next epoch, which a sampler opens now: others would take its turns.
                break
            else:  # nothing is left of it, or what it needs is down
                active.remove(name)
        counted = tuple(
            replace(each, begun=each.begun + begun.get(each.name, 0), credit=turns.credits[each.name])
            for each in sources
        )
        return chosen, counted

    async def _opened(self, sources: Sequence[MixtureSource], step: int) -> tuple[MixtureSource, ...]:
        """Return the sources with the gates open whose condition is met."""
        found = []
        for source in sources:
            if not source.is_open and (gate := source.gate) is not None:
                rates = await pass_rates(self._connection, gate.source, gate.groups)
                if len(rates) == gate.groups and fmean(rates) >= gate.pass_rate - _ALMOST:
                    source = _open(source, gate, "pass_rate", rates, step)
            found.append(source)
        return tuple(found)

    async def _last_resort(
        self, sources: Sequence[MixtureSource], epochs: int, step: int = 0
    ) -> tuple[MixtureSource, ...]:
        """Return the sources with the gates open that can never open; none if something else is left.

        Nothing is left once every group of the open sources is finalized: no pass rate changes any more.
        """
        if all(each.is_open for each in sources):
            return ()
        unfinished = {
            "split": MIXED_SPLIT, "status": {"$in": values((TaskStatus.RUNNING, TaskStatus.WAITING))},
            "epoch": {"$ne": CONVERSATIONS},
        }  # fmt: skip
        if await self._collection(TASK).find_one(unfinished, {"_id": 1}) is not None:
            return ()
        exhausted = {each.name for each in sources if each.is_open}
        for name in exhausted:
            if await self._waiting(name, 1, {}) or await self._epoch_is_due(name, epochs):
                return ()
        found = []
        for source in sources:
            if not source.is_open and (gate := source.gate) is not None and gate.source in exhausted:
                rates = await pass_rates(self._connection, gate.source, gate.groups)
                source = _open(source, gate, "exhausted", rates, step)
            found.append(source)
        return tuple(found)

    async def _waiting(self, source: str, count: int, excluded: Json) -> list[Json]:
        """Return the next tasks of a source, in order, whose groups are not begun."""
        query = {"split": MIXED_SPLIT, "status": TaskStatus.CREATED.value, "source": source, **excluded}
        shown = {"generations": {"$size": "$slots"}}
        return await self._collection(TASK).find(query, shown, sort=BY_ORDER, limit=count).to_list()

    async def _epoch_is_due(self, source: str, epochs: int) -> bool:
        """Return whether a source gets more tasks: by its next epoch, or by a load that has not ended."""
        openings = await openings_of(self._connection, MIXED_SPLIT)
        loaded = openings.get(None, {}).get(0, EpochOpening(id=""))
        return (
            loaded.status is not EpochStatus.OPEN
            or following_epoch(openings.get(source, {}), epochs) is not None
        )


def _open(
    source: MixtureSource, gate: SourceGate, because: Literal["pass_rate", "exhausted"],
    rates: Sequence[float], step: int,
) -> MixtureSource:  # fmt: skip
    rate = fmean(rates) if rates else None
    opened = GateOpening(at=now(), because=because, pass_rate=rate, after_step=step)
    return replace(source, opened=opened)
