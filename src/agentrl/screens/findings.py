"""Decide what is wrong with a run now, the worst first, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from agentrl.documents.status import DataStatus, RecordStatus, ServiceStatus, TaskStatus
from agentrl.observe.terminal import duration, percent
from agentrl.screens.snapshot import TRAIN, RunSnapshot
from agentrl.screens.views.pipelines import StepRow

Severity = Literal["bad", "warn", "good"]

_LAST = 5
"""Steps whose mean is judged."""
_LATE_STEPS, _LATE_SECONDS = 5.0, 60.0
"""A step is late after this many times the median of the last ones, and this many seconds at least."""
_COLLAPSED_ENTROPY = 0.2
_SOLVED = 0.95
"""Pass rate at which a task set counts as solved; a falling entropy is then expected."""
_GRADIENT_JUMP = 10.0
_REWARD_LOSS = 0.25
"""Of the span between the lowest and the highest reward."""
_FAILED_WARN, _FAILED_BAD = 0.05, 0.3
_FEW_ATTEMPTS = 10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or worth knowing."""

    severity: Severity
    what: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """The usual range of a metric's mean over the last steps, and what to say beyond it."""

    metric: str
    warn: float
    bad: float | None = None
    is_lowest: bool = False
    """Whether ``warn`` is the lowest usual value; else it is the highest."""
    what: str
    """``{}`` stands for the mean."""
    hint: str
    shown: Callable[[float], str] = percent


_BOUNDS: Sequence[_Bound] = (
    _Bound(
        metric="kl_k3", warn=0.05, bad=0.5, shown="{:.3f}".format,
        what="KL(μ‖π) is {} nats a token: another policy sampled the data",
        hint="lower --max_staleness or the learning rate; on fresh data engine and trainer differ: see"
        " agentrl parity",
    ),
    _Bound(
        metric="effective_sample_size", warn=0.5, is_lowest=True,
        what="the effective sample size is {}: few tokens carry the gradient",
        hint="lower --max_staleness, or bound the weights with a correction such as tis",
    ),
    _Bound(
        metric="masked_fraction", warn=0.3,
        what="{} of the tokens are masked: their policy is too old or too far away",
        hint="more samplers do not help; a larger --max_staleness or a smaller learning rate does",
    ),
    _Bound(
        metric="abandoned_groups", warn=0.8,
        what="{} of the groups agree in their scores, and train nothing",
        hint="the tasks are too easy or too hard: see the dashboard's page Tasks, or --task_selection"
        " pass_rate",
    ),
)  # fmt: skip


def findings(run: RunSnapshot) -> list[Finding]:
    """Return what is wrong, the worst first; empty for a healthy run."""
    wrong = [finding for check in _CHECKS for finding in check(run)]
    return sorted(wrong, key=lambda finding: finding.severity != "bad")


def state(run: RunSnapshot) -> tuple[str, Severity | Literal[""]]:
    """Return the run's state as a word, and its color."""
    if run.trainer_alive:
        return (
            ("training", "good") if run.liveness.claims or not _unfinished(run) else ("trainer only", "warn")
        )
    if run.finished:
        return "finished", "good"
    if run.liveness.claims:
        return "sampling, no trainer", "warn"
    if not run.tasks:
        return "empty", ""
    return ("stopped", "warn") if _unfinished(run) else ("ended", "")


def seconds_since_step(run: RunSnapshot) -> float | None:
    """Return the seconds since the last committed step; None without one."""
    if not run.steps or run.steps[-1].committed_at is None:
        return None
    return max(0.0, (run.at - run.steps[-1].committed_at).total_seconds())


def mean_of_last(steps: Sequence[StepRow], name: str) -> float | None:
    """Return the mean of a metric over the last 5 of ``steps``; None if none has it."""
    values = _values(steps[-_LAST:], name)
    return fmean(values) if values else None


def _values(steps: Sequence[StepRow], name: str) -> list[float]:
    return [value for step in steps if (value := step.metric(name)) is not None]


def _unfinished(run: RunSnapshot) -> int:
    counts = run.tasks_by_split.get(TRAIN, {})
    return sum(counts.values()) - counts.get(TaskStatus.COMPLETED.value, 0)


def _working(run: RunSnapshot) -> bool:
    return run.trainer_alive or bool(run.liveness.claims)


def _outages(run: RunSnapshot) -> Iterator[Finding]:
    newest: dict[str, tuple[datetime, str, int]] = {}
    for outage in run.liveness.outages:
        began, why, held = newest.get(outage.dependency, (outage.began_at, outage.why, 0))
        newest[outage.dependency] = (min(began, outage.began_at), why, held + outage.held)
    for dependency, (began, why, held) in newest.items():
        age = duration((run.at - began).total_seconds())
        yield Finding(
            severity="bad",
            what=f"{dependency} is down for {age}; {held} calls wait for it: {why}",
            hint="start it again: what waits goes on by itself",
        )


def _engines(run: RunSnapshot) -> Iterator[Finding]:
    expected = [engine for engine in run.liveness.engines if engine.status is not ServiceStatus.STOPPED]
    live = run.liveness.live_engines
    if not live and _working(run):
        yield Finding(
            severity="bad",
            what="no inference engine is alive" + (f"; {len(expected)} fell silent" if expected else ""),
            hint="start one: agentrl serve; its log says why the last one ended",
        )
    elif len(live) < len(expected) and _working(run):
        yield Finding(
            severity="warn",
            what=f"{len(expected) - len(live)} of {len(expected)} engines have fallen silent",
            hint="their logs say why; agentrl serve starts another",
        )


def _processes(run: RunSnapshot) -> Iterator[Finding]:
    if run.finished:
        if run.liveness.claims:
            yield Finding(
                severity="warn",
                what="the trainer has finished, and samplers still begin trajectories",
                hint="stop them, or train on: agentrl train with a larger --max_steps",
            )
        return
    if not run.tasks or not _unfinished(run):
        return
    if run.trainer_alive and not run.liveness.claims:
        last = run.liveness.last_claim
        age = f"; the last trajectory began {duration((run.at - last).total_seconds())} ago" if last else ""
        yield Finding(
            severity="warn",
            what=f"no sampler holds a trajectory{age}",
            hint="start one: agentrl sample; one that runs may wait for the trainer or for a dependency",
        )
    elif run.liveness.claims and not run.trainer_alive:
        yield Finding(severity="warn", what="no trainer runs", hint="start one: agentrl train; it resumes")
    elif not _working(run):
        why = "the trainer was stopped" if run.lease.ended else "no process works on this run"
        yield Finding(
            severity="warn",
            what=f"{why}, and {_unfinished(run):,} of its tasks are unfinished",
            hint="start its trainer, samplers and engines again: they resume",
        )


def _late(run: RunSnapshot) -> Iterator[Finding]:
    since = seconds_since_step(run)
    moments = [step.committed_at for step in run.steps[-21:] if step.committed_at is not None]
    gaps = [(b - a).total_seconds() for a, b in pairwise(moments)]
    if since is None or not gaps or not run.trainer_alive:
        return
    usual = median(gaps)
    if since > max(_LATE_SECONDS, _LATE_STEPS * usual):
        yield Finding(
            severity="warn",
            what=f"the last step was {duration(since)} ago; a step usually takes {duration(usual)}",
            hint="look at what the trainer waits for: ready groups, engines, or a longer trajectory",
        )


def _means(run: RunSnapshot) -> Iterator[Finding]:
    """Yield a finding for each mean of the last steps beyond its bound."""
    for bound in _BOUNDS:
        mean = mean_of_last(run.steps, bound.metric)
        if mean is None or (mean >= bound.warn if bound.is_lowest else mean <= bound.warn):
            continue
        yield Finding(
            severity="bad" if bound.bad is not None and mean > bound.bad else "warn",
            what=bound.what.format(bound.shown(mean)),
            hint=bound.hint,
        )


def _learning(run: RunSnapshot) -> Iterator[Finding]:
    last = run.steps[-1].metrics if run.steps else {}
    numbers = [value for name in ("loss", "grad_norm") if isinstance(value := last.get(name), float)]
    if not all(map(math.isfinite, numbers)):
        yield Finding(
            severity="bad", what="the last step's loss or gradient is not finite", hint="see its log"
        )
    entropy, solved = _values(run.steps, "entropy"), mean_of_last(run.steps, "pass_rate")
    if (
        (solved is None or solved < _SOLVED)
        and len(entropy) >= 2 * _LAST
        and fmean(entropy[-_LAST:]) < _COLLAPSED_ENTROPY * fmean(entropy[:_LAST])
    ):
        yield Finding(
            severity="warn",
            what=f"the entropy fell from {fmean(entropy[:_LAST]):.3f} to {fmean(entropy[-_LAST:]):.3f} nats:"
            " the policy hardly explores",
            hint="raise the temperature or --entropy_coef, or clip less above 1",
        )
    norms = _values(run.steps, "grad_norm")
    if len(norms) > 2 * _LAST and norms[-1] > _GRADIENT_JUMP * median(norms[-21:-1]):
        yield Finding(
            severity="warn",
            what=f"the gradient norm jumped to {norms[-1]:.2g}, from a median of {median(norms[-21:-1]):.2g}",
            hint="the dashboard's page of the step lists its outliers",
        )
    rewards = _values(run.steps, "reward")
    part = max(_LAST, len(rewards) // 4)
    if len(rewards) >= 4 * _LAST and fmean(rewards[-part:]) < max(
        fmean(rewards[index : index + part]) for index in range(0, len(rewards) - part, part)
    ) - _REWARD_LOSS * (max(rewards) - min(rewards) or 1):
        yield Finding(
            severity="warn",
            what=f"the reward has fallen to {fmean(rewards[-part:]):.3f} over the last {part} steps",
            hint="compare KL(μ‖π), entropy and gradient norm where it began to fall",
        )


def _failures(run: RunSnapshot) -> Iterator[Finding]:
    counts = run.records.get(TRAIN, {})
    failed = counts.get(RecordStatus.FAILED.value, 0)
    total = sum(counts.values())
    if total >= _FEW_ATTEMPTS and failed / total > _FAILED_WARN:
        worst = next((item for item in run.failures if item.record is not None), None)
        most = f"; most often {worst.kind}: {worst.message[:160]}" if worst else ""
        yield Finding(
            severity="bad" if failed / total > _FAILED_BAD else "warn",
            what=f"{percent(failed / total)} of {total:,} attempts failed{most}",
            hint="the list of failures has an example of each kind",
        )
    quarantined = sum(counts.get(DataStatus.QUARANTINED.value, 0) for counts in run.data.values())
    if quarantined:
        yield Finding(
            severity="warn",
            what=f"{quarantined:,} trajectories must not be trained: {(run.quarantined_because or '')[:160]}",
            hint="agentrl db check explains them",
        )


_CHECKS: Sequence[Callable[[RunSnapshot], Iterator[Finding]]] = (
    _outages,
    _engines,
    _processes,
    _late,
    _means,
    _learning,
    _failures,
)
