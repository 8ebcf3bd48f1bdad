"""Say what a starting run waits for until its first optimizer step, and then how long the rest takes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.config.schema import RunConfig
from agentrl.documents.status import ServiceStatus, StepStatus
from agentrl.errors import AgentRLError
from agentrl.quickstart.pace import Pace
from agentrl.quickstart.worth_reading import RIGHT
from agentrl.store.names import STEP

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.views.rows import StepRow

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""Least time between two lines about sampling."""

_POLL_SECONDS = 1.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Start:
    """How far the start of a run is."""

    is_serving: bool
    """An engine is ready."""
    finished: int
    """Trajectories with a score."""
    right: int
    """Those whose score is above RIGHT."""
    groups: int
    """Finished groups with a signal, ready for the trainer."""


@contextlib.contextmanager
def told_progress(
    run: RunConfig, groups_per_step: int, pace: Pace, report: Callable[[str], None]
) -> Iterator[None]:
    """Report from a thread what the run waits for, and after a step how long the rest takes."""
    ended = threading.Event()
    teller = threading.Thread(
        target=lambda: asyncio.run(_tell(run, groups_per_step, pace, report, ended)), daemon=True
    )
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join(_STOP_SECONDS)


class StartLines:
    """Chooses when the state of a start is worth a line."""

    def __init__(self, groups_per_step: int) -> None:
        """``groups_per_step`` is what the trainer waits for."""
        self._groups = groups_per_step
        self._shown: Start | None = None
        self._last_line = 0.0

    def line(self, state: Start, seconds: float) -> str | None:
        """Return the line for ``state`` after ``seconds``; None if nothing new is worth one."""
        shown = self._shown
        if state == shown or (self._is_late(state) and seconds - self._last_line < LINE_SECONDS):
            return None
        self._shown, self._last_line = state, seconds
        if not state.is_serving:
            return f"waiting for the engine, which loads the model ({seconds:.0f} s)"
        if shown is None or not shown.is_serving:
            return f"the engine is ready after {seconds:.0f} s; the samplers begin"
        ready = min(state.groups, self._groups)
        return (
            f"{'the trainer computes its step' if ready == self._groups else 'sampling'}:"
            f" {state.finished} trajectories have a score, {state.right} of them are right;"
            f" {ready} of {self._groups} groups are ready ({seconds:.0f} s)"
        )

    def _is_late(self, state: Start) -> bool:
        """Return whether only counts changed since the last line."""
        return self._shown is not None and self._shown.is_serving == state.is_serving


async def _tell(
    run: RunConfig,
    groups_per_step: int,
    pace: Pace,
    report: Callable[[str], None],
    ended: threading.Event,
) -> None:
    from agentrl.store.client import open_store

    began, lines = time.monotonic(), StartLines(groups_per_step)
    serving_since, is_first = began, True
    try:
        async with await open_store(run) as store:
            seen = _committed_at(await _last_committed(store))
            while not ended.is_set():
                last = await _last_committed(store)
                if last is not None and _committed_at(last) > seen:
                    seen = _committed_at(last)
                    training = float(last.metrics["seconds_forward_backward"])
                    line = pace.step(last.step, last.metrics, time.monotonic() - serving_since - training)
                    is_first = False
                elif is_first:
                    state = await _read_start(store)
                    if not state.is_serving:
                        serving_since = time.monotonic()
                    line = lines.line(state, time.monotonic() - began)
                    pace.waiting = line or pace.waiting
                else:
                    line = None
                if line is not None:
                    report(line)
                await store.wait_for_change(STEP, timeout=_POLL_SECONDS)
    except AgentRLError as error:  # only these lines are lost: the processes report their own errors
        logger.info("the progress of the run cannot be read: %s", error.message)


async def _last_committed(store: Store) -> StepRow | None:
    rows = await store.views.steps(status=StepStatus.COMMITTED, last=1)
    return rows[-1] if rows else None


def _committed_at(step: StepRow | None) -> float:
    return 0.0 if step is None or step.committed_at is None else step.committed_at.timestamp()


async def _read_start(store: Store) -> Start:
    engines = await store.views.engines()
    scores = [row.score for row in await store.views.trajectories(split="train") if row.score is not None]
    serving = (ServiceStatus.READY, ServiceStatus.UPDATING)
    counts = await store.details.groups()
    return Start(
        is_serving=any(engine.status in serving for engine in engines),
        finished=len(scores),
        right=sum(score > RIGHT for score in scores),
        groups=sum(count.groups - count.abandoned_groups for count in counts),
    )
