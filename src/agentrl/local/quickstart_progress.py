"""Follow a quickstart while it runs: how long the rest takes, its time limit, and what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentrl.config.schema import RunConfig
from agentrl.documents.status import ServiceStatus, StepStatus
from agentrl.errors import AgentRLError, TimeLimitError
from agentrl.screens.views.counts import Details
from agentrl.screens.views.read import Views
from agentrl.store.mechanics.connection import STEP

if TYPE_CHECKING:
    from agentrl.screens.views.pipelines import StepRow
    from agentrl.store.client import Store

RIGHT = 0.5
"""A trajectory is right when its score is above this."""

ENDS = 3
"""Steps at each end of the run over which the reward is averaged."""

SOLVED = 0.95
"""Mean reward of the last ENDS steps that solves the tasks: what is left to learn is a matter of luck."""


def is_solved(rewards: Sequence[float]) -> bool:
    """Return whether the last ENDS rewards are there, and SOLVED on average: few groups have a signal."""
    return len(rewards) >= ENDS and fmean(rewards[-ENDS:]) >= SOLVED


logger = logging.getLogger(__name__)

SLACK = 2.0
"""The default limit leaves the rest this many times its estimate."""

LONGEST_MINUTES = 60.0
"""The default limit is never longer."""

_START_SECONDS = 60.0
"""Time for the start of the processes in the limit that is recommended."""

_RETOLD_SHARE, _RETOLD_SECONDS = 0.25, 60.0
_PARTS = {
    "training": ("seconds_pack", "seconds_forward_backward", "seconds_optimizer"),
    "sampling": ("seconds_data",),
    "publishing": ("seconds_publish",),
}
_ADVICE = {
    "training": "training is the slowest part",
    "sampling": "the trainer mostly waits for samples: the engine is the slowest part",
    "publishing": "publishing is the slowest part: the disk of output/ is slow",
}

LINE_SECONDS = 10.0
"""Least time between two lines about sampling."""

_POLL_SECONDS = 0.5
_PROGRESS_STOP_SECONDS = 10.0


class Pace:
    """Follows the steps of a run: its time limit, and what is said about the time that is left.

    One thread calls ``step``, another one reads ``deadline``.
    """

    def __init__(
        self,
        steps: int,
        *,
        minutes: float | None,
        least_minutes: float,
        ends_when_solved: bool = False,
        skips_first: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin now. ``minutes`` is the user's limit; without it the limit follows the measured speed.

        That default is at least ``least_minutes``, which is also the limit of the first step. A run that
        ``ends_when_solved`` ends after the step that solves it. With ``skips_first`` the first step, whose
        data were sampled beside an evaluation, estimates nothing.
        """
        self.steps = steps
        self.is_solved = False
        """The deadline is now, because the run is solved."""
        self._ends_when_solved, self._skips_first = ends_when_solved, skips_first
        self.waiting = "the engine has not started"
        """What the run waits for before its first step."""
        self._minutes = minutes
        self._clock = clock
        self._began = clock()
        self._deadline = self._began + 60 * (least_minutes if minutes is None else minutes)
        self._first: tuple[int, float] | None = None
        self._metrics: list[Mapping[str, Any]] = []
        self._last = 0
        self._rewards: list[float] = []
        """Of the steps up to the last one, without a gap."""
        self._told_end: float | None = None

    def deadline(self) -> float:
        """Return the end of the time limit, as ``time.monotonic`` counts."""
        return self._deadline

    @property
    def limit(self) -> str:
        """The time limit as text."""
        return shown(self._deadline - self._began)

    @property
    def is_over(self) -> bool:
        """The time limit has passed."""
        return self._clock() >= self._deadline

    def step(self, done: int, metrics: Mapping[str, Any], sampling: float) -> str | None:
        """Note that ``done`` steps are committed; return a line about the rest, or None without news.

        ``metrics`` are those of the last step; its data were ``sampling`` seconds' work.
        """
        now = self._clock()
        # Until an engine serves, the first step waits for the engine and not for samples.
        self._metrics.append({**metrics, "seconds_data": min(metrics["seconds_data"], sampling)})
        if self._first is None:
            self._first = done, now
        if self._ends_when_solved:
            # Forget those before a gap: a step that was committed between two looks may have a lower reward.
            self._rewards = [*(self._rewards if done == self._last + 1 else ()), float(metrics["reward"])]
            self._last = done
        left = self.steps - done
        if left <= 0 or self.is_over:
            return None
        if is_solved(self._rewards):
            self.is_solved, self._deadline = True, now
            mean = fmean(self._rewards[-ENDS:])
            return f"solved at step {done} of {self.steps}: the reward of {ENDS} steps in a row is {mean:.2f}"
        before, began = self._first
        if done == before and self._skips_first:
            return None
        each = (now - began) / (done - before) if done > before else _first_estimate(metrics, sampling)
        if self._minutes is None:
            longest = self._began + 60 * LONGEST_MINUTES
            self._deadline = max(self._deadline, min(now + SLACK * left * each, longest))
        end = now + left * each
        moved = abs(end - self._told_end) if self._told_end is not None else float("inf")
        if moved <= max(_RETOLD_SECONDS, _RETOLD_SHARE * (end - now)):
            return None
        self._told_end = end
        return (
            f"step {done} of {self.steps} after {shown(now - self._began)}; the other {left} take about"
            f" {shown(left * each)} on this machine ({each:.0f} s each); {self._limit_line(now, end, each)}"
        )

    def _limit_line(self, now: float, end: float, each: float) -> str:
        if end <= self._deadline:
            return f"the time limit is {self.limit}"
        fitting = int((self._deadline - now) / each)
        minutes = self._enough_minutes(end - self._began)
        return (
            f"the time limit of {self.limit} leaves time for about {fitting} of them:"
            f" --minutes {minutes} trains all"
        )

    def ended(self, done: int) -> TimeLimitError:
        """Return the error of a run that its limit ended with ``done`` steps: the reason, and what to do."""
        passed = self._clock() - self._began
        head = f"{done} of {self.steps} steps in {shown(passed)}"
        again = "the same command trains the rest"
        if not self._metrics:
            return TimeLimitError(
                f"{head}: {self.waiting}",
                hint=f"{again}: give it --minutes {self._enough_minutes(4 * passed)}; see the run's logs",
            )
        parts = {name: fmean(_sum(item, keys) for item in self._metrics) for name, keys in _PARTS.items()}
        speed = fmean(float(item["tokens_per_second"]) for item in self._metrics)
        slowest = max(parts, key=lambda name: parts[name])
        each = sum(parts.values())
        minutes = self._enough_minutes(_START_SECONDS + (self.steps - done) * each)
        return TimeLimitError(
            f"{head}: a step takes {each:.0f} s: {parts['training']:.0f} s of training"
            f" ({speed:,.0f} tokens/s), {parts['sampling']:.0f} s of waiting for samples,"
            f" {parts['publishing']:.0f} s of publishing; {_ADVICE[slowest]}",
            hint=f"{again}: give it --minutes {minutes};"
            " other work on this machine slows it down; --tiny trains a smaller model",
        )

    @staticmethod
    def _enough_minutes(seconds: float) -> int:
        return int(1.5 * seconds / 60) + 1


def shown(seconds: float) -> str:
    """Return a duration for a sentence: ``45 s``, ``2.5 min``, ``12 min``, ``2 h 5 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 10:
        return f"{round(seconds / 60, 1):g} min"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _first_estimate(metrics: Mapping[str, Any], sampling: float) -> float:
    """Return the seconds of a step by those of the first one: later, sampling and training overlap."""
    training = _sum(metrics, _PARTS["training"])
    return max(training, sampling) + _sum(metrics, _PARTS["publishing"])


def _sum(metrics: Mapping[str, Any], keys: Sequence[str]) -> float:
    return sum(float(metrics.get(key, 0.0)) for key in keys)


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
    trainer: str = ""
    """What the trainer does, as its lease says; empty without a trainer."""


@contextlib.contextmanager
def told_progress(
    run: RunConfig, groups_per_step: int, pace: Pace, report: Callable[[str], None]
) -> Iterator[threading.Event]:
    """Report from a thread what the run waits for, and after a step how long the rest takes.

    Yields an event that is set when an engine serves, or when the progress cannot be read.
    """
    ended, serving = threading.Event(), threading.Event()
    teller = threading.Thread(
        target=lambda: asyncio.run(_tell(run, groups_per_step, pace, report, ended, serving)), daemon=True
    )
    teller.start()
    try:
        yield serving
    finally:
        ended.set()
        teller.join(_PROGRESS_STOP_SECONDS)


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
        only_counts = shown is not None and self._phase(shown) == self._phase(state)
        if state == shown or (only_counts and seconds - self._last_line < LINE_SECONDS):
            return None
        self._shown, self._last_line = state, seconds
        if not state.is_serving:
            return f"waiting for the engine, which loads the model ({seconds:.0f} s)"
        if shown is None or not shown.is_serving:
            return f"the engine is ready after {seconds:.0f} s; the samplers begin"
        ready = min(state.groups, self._groups)
        trainer = f"the trainer is {state.trainer}" if state.trainer else "the trainer has not begun"
        return (
            f"{trainer if ready == self._groups else 'sampling'}:"
            f" {state.finished} trajectories have a score, {state.right} of them are right;"
            f" {ready} of {self._groups} groups are ready ({seconds:.0f} s)"
        )

    def _phase(self, state: Start) -> tuple[bool, str | None]:
        return state.is_serving, state.trainer if state.groups >= self._groups else None


async def _tell(
    run: RunConfig,
    groups_per_step: int,
    pace: Pace,
    report: Callable[[str], None],
    ended: threading.Event,
    serving: threading.Event,
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
                    if state.is_serving:
                        serving.set()
                    else:
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
    finally:
        serving.set()


async def _last_committed(store: Store) -> StepRow | None:
    rows = await Views(store.connection).steps(status=StepStatus.COMMITTED, last=1)
    return rows[-1] if rows else None


def _committed_at(step: StepRow | None) -> float:
    return 0.0 if step is None or step.committed_at is None else step.committed_at.timestamp()


async def _read_start(store: Store) -> Start:
    views = Views(store.connection)
    engines = await views.engines()
    scores = [row.score for row in await views.trajectories(split="train") if row.score is not None]
    serving = (ServiceStatus.READY, ServiceStatus.UPDATING, ServiceStatus.LENT)
    counts = await Details(store.connection).groups()
    lease, at = await store.trainer_lease.read(), await store.connection.server_time()
    return Start(
        is_serving=any(engine.status in serving for engine in engines),
        finished=len(scores),
        right=sum(score > RIGHT for score in scores),
        groups=sum(count.groups - count.abandoned_groups for count in counts),
        trainer=lease.doing.shown if lease.doing is not None and lease.is_held(at) else "",
    )
