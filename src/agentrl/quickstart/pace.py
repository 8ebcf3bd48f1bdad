"""Estimate how long the rest of a quickstart takes, limit its time, and say why the limit ended it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from agentrl.errors import TimeLimitError

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin now. ``minutes`` is the user's limit; without it the limit follows the measured speed.

        That default is at least ``least_minutes``, which is also the limit of the first step.
        """
        self.steps = steps
        self.waiting = "the engine has not started"
        """What the run waits for before its first step."""
        self._minutes = minutes
        self._clock = clock
        self._began = clock()
        self._deadline = self._began + 60 * (least_minutes if minutes is None else minutes)
        self._first: tuple[int, float] | None = None
        self._metrics: list[Mapping[str, Any]] = []
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
        left = self.steps - done
        if left <= 0 or self.is_over:
            return None
        before, began = self._first
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
