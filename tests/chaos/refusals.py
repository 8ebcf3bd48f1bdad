"""A manager of tools that is dead, and a judge that refuses everybody, under a fixed number of slots.

    bash scripts/chaos.sh --refusals 60     480 slots; the manager is away 3 × 15 s, the judge 2 × 60 s

The manager is dead when the samplers start, serves a page of HTML, serves, and is killed. The judge
answers 429, then a page. The slots are counted at the end of each, and all must be scored at the end of all.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.store.client import Store
from chaos.drills import becomes_reported, count, wait_for_scores
from chaos.report import Findings
from chaos.scene import GENERATIONS, READY_SECONDS, Scene

logger = logging.getLogger(__name__)

_FINISH_SECONDS = 600.0
_ALIVE = ("engine", "judge", "sampler-0", "sampler-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One way in which a service was away, and the slots at its end."""

    service: str
    how: str
    seconds: float
    closed: int
    attempts_used: int
    sampled: int
    reported: bool


@dataclass(kw_only=True)
class Report(Findings):
    """All refusals."""

    slots: int
    refusals: list[Refusal] = field(default_factory=list)

    def figures(self) -> list[str]:
        """Return one line for each refusal."""
        return [
            f"{item.service}, {item.how}, {item.seconds:.0f} s: {item.closed} of {self.slots} slots closed,"
            f" {item.attempts_used} attempts used, {item.sampled} sampled,"
            f" {'reported' if item.reported else 'NOT REPORTED'}"
            for item in self.refusals
        ]


async def run_refusals(folder: Path, seconds: float, *, tasks: int) -> Report:
    """Take the manager and the judge away from samplers of ``tasks``, the judge for ``seconds`` each time."""
    report = Report(slots=tasks * GENERATIONS)
    scene = Scene(folder, has_manager=True)
    async with scene.opened(60) as store:
        async with scene.running(store, *_ALIVE):
            await store.tasks.load([scene.task(number) for number in range(tasks)])
            await _count_after(store, report, "manager", "dead from the start", seconds / 4)
            await scene.start("tools")
            await scene.set_mode("tools", "html")
            await _count_after(store, report, "manager", "200 with HTML", seconds / 4)
            await scene.set_mode("tools", "up")
            await wait_for_scores(store, 1, READY_SECONDS)
            await asyncio.to_thread(scene.kill, "tools")
            await _count_after(store, report, "manager", "killed", seconds / 4)
            await scene.set_mode("judge", "limited")
            await scene.start("tools")
            await _count_after(store, report, "judge", "429", seconds)
            await scene.set_mode("judge", "html")
            await _count_after(store, report, "judge", "200 with HTML", seconds)
            await scene.set_mode("judge", "up")
            await wait_for_scores(store, report.slots - (await count(store)).scored, _FINISH_SECONDS)
        report.violations += await scene.check()
    return report


async def _count_after(store: Store, report: Report, service: str, how: str, seconds: float) -> None:
    """Wait until the outage is reported, and ``seconds`` more; then count."""
    logger.info("%s: %s for %g s", service, how, seconds)
    name = "judge" if service == "judge" else "tool server"
    reported = await becomes_reported(store, name)
    await asyncio.sleep(seconds)
    counts = await count(store)
    report.refusals.append(
        Refusal(
            service=service, how=how, seconds=seconds, closed=counts.closed,
            attempts_used=counts.attempts_used, sampled=counts.sampled, reported=reported,
        )
    )  # fmt: skip
    if counts.closed or counts.attempts_used or counts.resampled or not reported:
        report.violations.append(f"{service}, {how}: slots closed, attempts used, or it is not reported")
