"""Outage drills: each service of two samplers is down for a while; no attempt is used, nothing sampled twice.

    bash scripts/chaos.sh --drills 60        engine, tool server, judge and database, 60 s each
    bash scripts/chaos.sh --drills 60 --only judge

The samplers, the engine, the tool server, the judge and MongoDB are processes of their own. A drill waits
until trajectories are scored, takes one service away, brings it back, and waits until they are scored again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ready_data import statuses
from waiting import comes_true

from agentrl.documents.status import RecordStatus, SlotStatus
from agentrl.documents.task import Slot, Task
from agentrl.errors import DATABASE, AgentRLError
from agentrl.store.client import Store
from chaos.report import Findings
from chaos.scene import READY_SECONDS, Scene

logger = logging.getLogger(__name__)

DRILLS = ("engine", "tool server", "judge", "database")
_NEEDED = {"engine": "the engines", "tool server": "tool server ", "judge": "judge"}
"""Drill → the beginning of what the samplers must report as down."""
_TASKS = 4000
_REPORT_SECONDS = 120.0
_RESUME_SECONDS = 120.0
_POLL_SECONDS = 0.25
_SCORED_BETWEEN = 8


@dataclass(slots=True, kw_only=True)
class Counts:
    """What the database holds at one moment."""

    claimed: int
    sampled: int
    scored: int
    closed: int
    """Slots that failed for good."""
    attempts_used: int
    resampled: int


@dataclass(slots=True, kw_only=True)
class Drill:
    """One drill and what came of it."""

    name: str
    seconds: float
    claimed: int = 0
    """Claims made in the second half of the outage."""
    scored: int = 0
    """Scores during the outage."""
    reported: bool = True
    """Whether the samplers reported what was down."""
    resumed: float = 0.0
    """Seconds until a trajectory was scored after the outage."""
    attempts_used: int = 0
    resampled: int = 0


@dataclass(kw_only=True)
class Report(Findings):
    """All drills."""

    drills: list[Drill] = field(default_factory=list)
    scored: int = 0

    def figures(self) -> list[str]:
        """Return a table of the drills."""
        titles = (
            "outage of", "seconds", "claims", "scores", "reported", "resumed in", "attempts used",
            "resampled",
        )  # fmt: skip
        rows = [
            (drill.name, f"{drill.seconds:.0f}", str(drill.claimed), str(drill.scored),
             "yes" if drill.reported else "NO", f"{drill.resumed:.1f} s", str(drill.attempts_used),
             str(drill.resampled))
            for drill in self.drills
        ]  # fmt: skip
        widths = [max(len(row[place]) for row in (titles, *rows)) for place in range(len(titles))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in (titles, *rows)
        ]
        return [*table, f"{self.scored} trajectories scored"]


async def run_drills(
    folder: Path, seconds: float, names: Sequence[str] = DRILLS, *, tasks: int = _TASKS
) -> Report:
    """Run the drills one after another on one run, and return the report; stop everything at the end.

    ``tasks`` must be more than are sampled meanwhile.
    """
    scene = Scene(folder)
    report = Report()
    async with scene.opened(600) as store:
        async with scene.running(store):
            await store.tasks.load([scene.task(number) for number in range(tasks)])
            await wait_for_scores(store, _SCORED_BETWEEN, READY_SECONDS)
            for name in names:
                report.drills.append(await _drill(scene, store, name, seconds))
            report.scored = (await count(store)).scored
        report.violations += [
            f"outage of {drill.name}: attempts used, trajectories resampled or not reported"
            for drill in report.drills
            if drill.attempts_used or drill.resampled or not drill.reported
        ]
        report.violations += await scene.check()
    return report


async def _drill(scene: Scene, store: Store, name: str, seconds: float) -> Drill:
    logger.info("outage of %s for %g s", name, seconds)
    before = await count(store)
    drill = Drill(name=name, seconds=seconds)
    if name == "database":
        await scene.mongo.kill(seconds)
    else:
        await _take_away(scene, name)
        await asyncio.sleep(seconds / 2)
        drill.reported = await becomes_reported(store, name)
        middle = await count(store)
        if name == "judge":
            await scene.set_mode("judge", "html")
        await asyncio.sleep(seconds / 2)
        during = await count(store)
        drill.claimed = during.claimed - middle.claimed
        drill.scored = during.scored - before.scored
        await _bring_back(scene, name)
    started = time.monotonic()
    await wait_for_scores(store, 1, _RESUME_SECONDS)
    drill.resumed = time.monotonic() - started
    await wait_for_scores(store, _SCORED_BETWEEN, _RESUME_SECONDS)
    if name == "database":
        drill.reported = await _is_recorded(store)
    after = await count(store)
    drill.attempts_used = after.attempts_used - before.attempts_used
    drill.resampled = after.resampled - before.resampled
    return drill


async def becomes_reported(store: Store, name: str) -> bool:
    """Return whether a sampler stores in time that the service is down."""

    async def is_reported() -> bool:
        return any(item.dependency.startswith(_NEEDED[name]) for item in await store.outages.ongoing())

    return await comes_true(is_reported, _REPORT_SECONDS, _POLL_SECONDS)


async def _is_recorded(store: Store) -> bool:
    """Return whether a sampler stores, soon after an outage of the database, that there was one."""

    async def is_recorded() -> bool:
        return any(item.dependency == str(DATABASE) for item in await store.outages.past(20))

    return await comes_true(is_recorded, _RESUME_SECONDS, _POLL_SECONDS)


async def _take_away(scene: Scene, name: str) -> None:
    if name == "judge":
        await scene.set_mode("judge", "limited")
        return
    scene.engine_is_up = name != "engine"
    await asyncio.to_thread(scene.kill, "engine" if name == "engine" else "tools")


async def _bring_back(scene: Scene, name: str) -> None:
    if name == "judge":
        await scene.set_mode("judge", "up")
        return
    await scene.start("engine" if name == "engine" else "tools")
    scene.engine_is_up = True


async def wait_for_scores(store: Store, more: int, seconds: float) -> None:
    """Wait until ``more`` trajectories have been scored. Raises AgentRLError after ``seconds``."""
    goal = (await count(store)).scored + more

    async def are_scored() -> bool:
        return (await count(store)).scored >= goal

    if not await comes_true(are_scored, seconds, _POLL_SECONDS):
        raise AgentRLError(f"{more} trajectories were not scored within {seconds:g} s", hint="see the logs")


async def count(store: Store) -> Counts:
    """Count the claimed slots and their Records."""
    records = await statuses(store, "Record")
    tasks = [
        Task.from_document(item) async for item in store.database["Task"].find({"slots.attempt": {"$gt": 0}})
    ]
    slots = [slot for task in tasks for slot in task.slots]
    closed = [slot for slot in slots if slot.status is SlotStatus.FAILED]
    completed = {"completed_at": {"$ne": None}}
    lost = {**completed, "status": {"$in": [RecordStatus.FAILED.value, RecordStatus.RELEASED.value]}}
    return Counts(
        claimed=sum(slot.attempt for slot in slots),
        sampled=await store.database["Record"].count_documents(completed),
        scored=sum(
            records[status] for status in (RecordStatus.SCORED, RecordStatus.READY, RecordStatus.ABANDONED)
        ),
        closed=len(closed),
        attempts_used=sum(map(_attempts_used, slots)),
        resampled=await store.database["Record"].count_documents(lost),
    )


def _attempts_used(slot: Slot) -> int:
    """Return the attempts at a slot that count and did not lead to its trajectory."""
    counted = slot.attempt - slot.released
    return max(
        0, counted if slot.status is SlotStatus.FAILED else counted - (slot.status is not SlotStatus.OPEN)
    )
