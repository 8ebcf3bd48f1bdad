"""Invariant 6: every epoch of a split holds every task of epoch 0, once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentrl.documents.run import epoch_key
from agentrl.documents.status import EpochStatus
from agentrl.store.admin.check.findings import Findings, Invariant, Problem
from agentrl.store.admin.check.reading import Snapshot, Whole, differing
from agentrl.store.epochs import id_prefix
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import EPOCH, TASK

_NAMED = 5


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One epoch: the number of its tasks and its ``Epoch`` documents."""

    split: str
    number: int
    tasks: int
    opening: Json | None
    first: Json | None
    """The document of epoch 0."""

    @property
    def name(self) -> str:
        return f"Epoch {epoch_key(self.split, self.number)}"

    @property
    def is_open(self) -> bool:
        """Whether every task must exist: no load or opening is in progress or due."""
        if self.opening is None:
            return False
        loaded = self.first or self.opening
        is_loaded: bool = loaded["status"] == EpochStatus.OPEN
        has_all: bool = self.opening["tasks"] >= loaded["tasks"]
        return is_loaded and self.opening["status"] == EpochStatus.OPEN and has_all

    @property
    def is_begun_early(self) -> bool:
        """Whether it is not open yet and holds only tasks selected in advance (``--task_selection``)."""
        return self.opening is not None and self.number > 0 and not self.opening["attempt"]


class Epochs(Whole):
    """Checks every epoch of every split."""

    async def inspect(self, moment: Snapshot, findings: Findings) -> None:
        openings = {opening["_id"]: opening for opening in await moment.find(EPOCH, {})}
        for epoch in _epochs(await _counts(moment), openings):
            findings.count(Invariant.EPOCHS, "epochs")
            findings.count(Invariant.EPOCHS, "tasks", epoch.tasks)
            if epoch.opening is None:
                problem = Problem(epoch.name, "its document", "one", "none")
                findings.add(Invariant.EPOCHS, None, [problem])
            elif epoch.is_open:
                findings.add(Invariant.EPOCHS, None, await _problems(moment, epoch))
            elif epoch.is_begun_early:
                findings.note(f"{epoch.name} is not open yet: {epoch.tasks} of its tasks were begun early")
            elif self.options.is_final:
                what = "open at the end of the run"
                found = f"{epoch.tasks} tasks of an opening that has not ended"
                findings.add(Invariant.EPOCHS, None, [Problem(epoch.name, what, "every task", found)])
            else:
                findings.note(f"{epoch.name} is being opened: it holds {epoch.tasks} tasks by now")


async def _counts(moment: Snapshot) -> dict[tuple[str, int], int]:
    """Count Tasks by split and epoch; the sort makes the query covered by an index."""
    groups = await moment.aggregate(
        TASK,
        [
            {"$sort": {"split": 1, "epoch": 1, "order": 1}},
            {"$group": {"_id": {"split": "$split", "epoch": "$epoch"}, "tasks": {"$sum": 1}}},
        ],
    )
    return {(group["_id"]["split"], group["_id"]["epoch"]): group["tasks"] for group in groups}


def _epochs(counts: Mapping[tuple[str, int], int], openings: Mapping[str, Json]) -> Iterator[_Epoch]:
    recorded = {(key.rpartition("/")[0], int(key.rpartition("/")[2])) for key in openings}
    for split, number in sorted({*counts, *recorded}):
        yield _Epoch(
            split, number, counts.get((split, number), 0), openings.get(epoch_key(split, number)),
            openings.get(epoch_key(split, 0)),
        )  # fmt: skip


async def _problems(moment: Snapshot, epoch: _Epoch) -> Sequence[Problem]:
    """Return the problems of an open epoch."""
    opening = epoch.opening or {}
    problems = differing(epoch.name, [("tasks", epoch.tasks, opening["tasks"])])
    if epoch.number == 0:
        return problems
    missing, strange = await _differences(moment, epoch)
    for what, names in (("every task of epoch 0", missing), ("only tasks of epoch 0", strange)):
        if names:
            found = f"{len(names)} that differ: {', '.join(names[:_NAMED])}{', …' if names[_NAMED:] else ''}"
            problems.append(Problem(epoch.name, what, "the same tasks, each once", found))
    return problems


async def _differences(moment: Snapshot, epoch: _Epoch) -> tuple[list[str], list[str]]:
    """Return the tasks of epoch 0 that are missing, and those that epoch 0 does not have."""
    wanted = _task_ids(moment, epoch_key(epoch.split, 0))
    present = _task_ids(moment, epoch_key(epoch.split, epoch.number))
    missing: list[str] = []
    strange: list[str] = []
    left, right = await anext(wanted, None), await anext(present, None)
    while left is not None or right is not None:
        if right is None or (left is not None and _key(left) < _key(right)):
            missing.append(str(left))
            left = await anext(wanted, None)
        elif left is None or _key(right) < _key(left):
            strange.append(right)
            right = await anext(present, None)
        else:
            left, right = await anext(wanted, None), await anext(present, None)
    return missing, strange


def _key(task_id: str) -> bytes:
    """Return a sort key in the order of the server."""
    return task_id.encode("utf-8", "surrogatepass")


async def _task_ids(moment: Snapshot, key: str) -> AsyncIterator[str]:
    """Yield the ids of an epoch's tasks, in order."""
    async for task in moment.each(TASK, {"_id": id_prefix(f"{key}/")}, {"_id": 1}):
        yield task["_id"].removeprefix(f"{key}/")
