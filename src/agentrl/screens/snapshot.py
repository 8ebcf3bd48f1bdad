"""Read one run for a screen (``RunSnapshot``), and decide what is wrong with it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal, TypeVar, cast

from agentrl.base.concurrency import end_tasks
from agentrl.config.load import Configs
from agentrl.config.run import EngineConfig, EngineListConfig
from agentrl.documents.run import (
    TRAIN_ROLE,
    Evaluation,
    InferenceService,
    JudgeCheck,
    Outage,
    PolicyVersion,
    Relative,
    Retraction,
    RunSettings,
    TrainerLease,
)
from agentrl.documents.status import (
    APPLIED_STEPS,
    DataStatus,
    EvaluationStatus,
    RecordStatus,
    ServiceStatus,
    StepStatus,
    TaskStatus,
    TrainerEnd,
    VersionStatus,
    Work,
)
from agentrl.lab.deletion import Retractions
from agentrl.llm.agent_config import Prices
from agentrl.observe.terminal import duration, percent
from agentrl.screens.views.counts import AnswersSeen, Continued, Counts, FailureCount, Rates
from agentrl.screens.views.pipelines import EngineRow, StepRow
from agentrl.screens.views.read import Views
from agentrl.store.client import Store
from agentrl.store.costs import Costs, RunCosts
from agentrl.store.evaluations import SEEN_SECONDS
from agentrl.store.mixture import SourceState
from agentrl.store.run_list import Activity, Disk, activity_of
from agentrl.store.services import Liveness

LAST_VERSIONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """One published version: its size, what it cost the trainer, and which engines have served it."""

    version: int
    step: int
    encoding: str
    """``full``, ``delta`` or ``adapter``; ``tensor`` or ``distributed`` in the trainer's memory alone."""
    bytes: int
    """Of its files; 0 in the trainer's memory."""
    seconds_waited: float | None
    """How long the trainer waited for it; None before the next step is committed."""
    engines: int
    """Engines that have loaded it."""
    seconds_until_served: float | None
    """From its publication to the last of those engines that serves it; None without one."""


def published_versions(
    versions: Sequence[PolicyVersion], steps: Sequence[StepRow], engines: Sequence[InferenceService]
) -> list[PublishedVersion]:
    """Return the published ones of ``versions``, in their order; ``steps`` are committed, oldest first."""
    waited = {step.step: step.metric("seconds_publish") for step in steps}
    found = []
    for version in versions:
        if version.status is not VersionStatus.PUBLISHED:
            continue
        seconds = [
            max(0.0, (served.at - version.published_at).total_seconds())  # the trainer's clock may be ahead
            for engine in engines
            for served in engine.served
            if served.version == version.id
        ]
        found.append(
            PublishedVersion(
                version=version.id,
                step=version.step,
                encoding=version.live.kind if version.live and not version.files else version.encoding,
                bytes=version.bytes,
                # The metrics of a step are those of the last publication before it.
                seconds_waited=waited.get(version.step + 1) if version.id > 0 else None,
                engines=len(seconds),
                seconds_until_served=max(seconds, default=None),
            )
        )
    return found


TRAIN = "train"
MAX_STEPS = 5000
"""Steps that a curve shows; of a longer run, the last ones."""
_PAST_OUTAGES = 5
_RETRACTIONS, _TOMBSTONES = 10, 5
_COUNT_SECONDS = 3.0
_SLOW_SECONDS = 10.0
_STALE_SECONDS = 30.0
MAX_ENTRIES = 256
"""Values that a cache keeps."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """One run at the server's time ``at``: what the dashboard, ``agentrl status`` and ``audit run`` show."""

    run_name: str
    liveness: Liveness
    lease: TrainerLease
    steps: Sequence[StepRow]
    """The committed ones, oldest first."""
    planned: StepRow | None
    """The step that the trainer works on."""
    tasks: Mapping[tuple[str, int], Mapping[str, int]]
    """(split, epoch) → status → Tasks."""
    records: Mapping[str, Mapping[str, int]]
    """split → status as people read it (``SHOWN_STATUSES``) → Records."""
    data: Mapping[str, Mapping[str, int]]
    """split → status → training data."""
    quarantined_because: str | None
    failures: Sequence[FailureCount]
    """Failed attempts by kind, the most frequent first, then groups."""
    rates: Rates
    continued: Continued
    """Trajectories that went on in another process."""
    engines: Sequence[EngineRow]
    versions: Sequence[PublishedVersion]
    """The newest published versions, newest first."""
    past_outages: Sequence[Outage]
    """What was down, the latest first."""
    evaluations: Sequence[Evaluation]
    """Oldest first."""
    settings: Sequence[RunSettings]
    """The settings that the processes of the run agree on."""
    configurations: Sequence[RunSettings]
    """The newest resolved configuration of each role."""
    disk: Disk
    answers_seen: Sequence[AnswersSeen] = ()
    """Trajectories whose answer a tool had, by tool."""
    judge_checks: Sequence[JudgeCheck] = ()
    """What judges gave the gold slice, oldest first."""
    costs: RunCosts = field(default_factory=RunCosts)
    parent: Relative | None = None
    """Where it begins in another run."""
    children: Sequence[Relative] = ()
    sources: Sequence[SourceState] = ()
    """Those of a mixture."""
    starts: Sequence[RunSettings] = ()
    """The flags of the trainers, in their order (``flags_at``)."""
    retractions: Sequence[tuple[Retraction, Sequence[str]]] = ()
    """The newest retractions, newest first, each with the ids of its first tombstones."""

    @property
    def at(self) -> datetime:
        """The server's time."""
        return self.liveness.at

    @property
    def empty(self) -> bool:
        """Whether the database holds nothing of a run."""
        return not (self.tasks or self.records or self.engines or self.steps or self.planned)

    @property
    def trainer_alive(self) -> bool:
        """Whether a trainer holds the lease, by the server's clock."""
        return self.lease.is_held(self.at)

    @property
    def finished(self) -> bool:
        """Whether the last trainer reached ``--max_steps`` or the end of the data."""
        return not self.trainer_alive and self.lease.ended is TrainerEnd.FINISHED

    @property
    def activity(self) -> Activity:
        """What the run does now."""
        return activity_of(
            trainer=self.trainer_alive, samplers=bool(self.liveness.samplers),
            engines=bool(self.liveness.live_engines), ended=self.lease.ended,
        )  # fmt: skip

    @property
    def tasks_by_split(self) -> dict[str, dict[str, int]]:
        """Split → status → Tasks of all epochs."""
        counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for (split, _), by_status in self.tasks.items():
            for status, count in by_status.items():
                counts[split][status] += count
        return {split: dict(by_status) for split, by_status in counts.items()}

    @property
    def queues(self) -> dict[str, int]:
        """What waits between the processes of the train split: groups as tasks, else trajectories."""
        tasks, data = self.tasks_by_split.get(TRAIN, {}), self.data.get(TRAIN, {})
        return {
            **{f"tasks_{status.value}": tasks.get(status.value, 0) for status in TaskStatus},
            "waiting_for_score": self.liveness.waiting_for_score,
            **{
                f"data_{status.value}": data.get(status.value, 0)
                for status in (DataStatus.READY, DataStatus.PLANNED, DataStatus.TRAINED)
            },
        }

    def is_alive(self, engine: EngineRow) -> bool:
        """Return whether an engine is neither stopped nor silent."""
        return engine.id in {live.id for live in self.liveness.live_engines}

    def state_of(self, evaluation: Evaluation) -> str:
        """Return the status of an evaluation as people read it."""
        silent = (self.at - evaluation.seen_at).total_seconds() > SEEN_SECONDS
        if silent and evaluation.status is EvaluationStatus.RUNNING:
            return "lost: its process is silent"
        return str(evaluation.status)

    def flag(self, name: str) -> Any:
        """Return the value of a flag in the first stored configuration that has it; None without one."""
        return _flag(self.configurations, name)


class Cache:
    """Values by key. Callers that ask for a key while it is being read wait for the same read."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, tuple[float, object]] = OrderedDict()
        self._reads: dict[Hashable, asyncio.Task[object]] = {}

    async def get(
        self, key: Hashable, seconds: float, read: Callable[[], Awaitable[T]], *, stale: float = 0.0
    ) -> T:
        """Return the value of ``key``, read anew if it is older than ``seconds``. An error is not kept.

        A value that is older by up to ``stale`` seconds is returned at once, while it is read anew.
        """
        kept = self._values.get(key)
        if kept is not None and time.monotonic() - kept[0] <= seconds:
            self._values.move_to_end(key)
            return cast("T", kept[1])
        reading = self._reads.get(key)
        if reading is None:
            reading = asyncio.create_task(self._read(key, read), name="cached-read")
            self._reads[key] = reading
            reading.add_done_callback(_retrieve)
        if kept is not None and time.monotonic() - kept[0] <= seconds + stale:
            return cast("T", kept[1])
        return cast("T", await asyncio.shield(reading))

    def peek(self, key: Hashable) -> object | None:
        """Return the value of ``key`` of any age; None without one."""
        kept = self._values.get(key)
        return None if kept is None else kept[1]

    def clear(self) -> None:
        """Forget every value, after a change that all readers must see."""
        self._values.clear()

    async def close(self) -> None:
        """Cancel the reads that go on."""
        await end_tasks(*self._reads.values())

    async def _read(self, key: Hashable, read: Callable[[], Awaitable[object]]) -> object:
        try:
            value = await read()
            self._values[key] = (time.monotonic(), value)
            self._values.move_to_end(key)
            while len(self._values) > MAX_ENTRIES:
                self._values.popitem(last=False)
            return value
        finally:
            self._reads.pop(key, None)


def _retrieve(reading: asyncio.Task[object]) -> None:
    """Mark the error of a read as seen: the next caller reads again, and gets it."""
    if not reading.cancelled():
        reading.exception()


class SnapshotReader:
    """Reads snapshots of a run. Its cache keeps committed steps, and each count for some seconds."""

    def __init__(self, store: Store, cache: Cache | None = None, prices: Prices | None = None) -> None:
        self._store = store
        self._costs = partial(Costs(store.connection).read, prices)
        self._views = Views(store.connection)
        self._counts = Counts(store.connection)
        self._cache = Cache() if cache is None else cache

    async def read(self, alive_seconds: float | None = None) -> RunSnapshot:
        """Return the run as it is now.

        An engine is dead without a heartbeat for ``alive_seconds``, by default five of the run's intervals.
        """
        store, counts = self._store, self._counts
        flags = await self._cached("flags", store.settings.flags, _SLOW_SECONDS)
        configurations = list({item.role: item for item in flags}.values())
        if alive_seconds is None:
            interval = _flag(configurations, "heartbeat_seconds")
            engines = EngineListConfig()
            if isinstance(interval, int | float) and interval > 0:
                engines = EngineListConfig(heartbeat_seconds=float(interval))
            alive_seconds = engines.alive_seconds
        liveness = await store.services.liveness(TRAIN, alive_seconds)
        reads: dict[str, Awaitable[Any]] = {
            "lease": store.trainer_lease.read(),
            "steps": self.steps(),
            "planned": self._planned(),
            "tasks": self.tasks(),
            "records": self._cached("records", counts.records, stale=_STALE_SECONDS),
            "data": self._cached("data", counts.data, stale=_STALE_SECONDS),
            "quarantined_because": counts.quarantined_because(),
            "failures": self._cached("failures", counts.failures, _SLOW_SECONDS, _STALE_SECONDS),
            "rates": self._cached("rates", lambda: counts.rates(liveness.at)),
            "continued": self._cached("continued", counts.continued, _SLOW_SECONDS, _STALE_SECONDS),
            "answers_seen": self._cached("answers_seen", counts.answers_seen, _SLOW_SECONDS, _STALE_SECONDS),
            "judge_checks": self._cached("judge_checks", store.judge_checks.finished, _SLOW_SECONDS),
            "engines": self._cached("engines", self._views.engines),
            "versions": self._cached("versions", lambda: store.policy_versions.published(LAST_VERSIONS)),
            "past_outages": store.outages.past(_PAST_OUTAGES),
            "evaluations": self._cached("evaluations", store.evaluations.all),
            "settings": self._cached("settings", store.settings.all, _SLOW_SECONDS),
            "disk": self._cached("disk", counts.disk, _SLOW_SECONDS),
            "costs": self._cached("costs", self._costs, _STALE_SECONDS, _STALE_SECONDS),
            "parent": self._cached("parent", store.ancestry.parent, _SLOW_SECONDS),
            "children": self._cached("children", store.ancestry.children, _SLOW_SECONDS),
            "sources": self._cached("sources", store.mixtures.states, _SLOW_SECONDS, _STALE_SECONDS),
            "retractions": self._cached(
                "retractions",
                lambda: Retractions(store.connection).newest(_RETRACTIONS, _TOMBSTONES),
                _SLOW_SECONDS,
            ),
        }
        parts = dict(zip(reads, await asyncio.gather(*reads.values()), strict=True))
        parts["settings"] = list(parts["settings"].values())
        parts["versions"] = published_versions(parts["versions"], parts["steps"], liveness.engines)
        parts["starts"] = [item for item in flags if item.role == TRAIN_ROLE]
        return RunSnapshot(run_name=store.run_name, liveness=liveness, configurations=configurations, **parts)

    async def steps(self) -> list[StepRow]:
        """Return the committed steps, oldest first. Only new ones are read: a committed step is final.

        A trainer that resumes from a checkpoint undoes steps; then all are read again.
        """
        known = cast("list[StepRow] | None", self._cache.peek(("steps", self._store.run_name))) or []

        async def read() -> list[StepRow]:
            steps = self._views.steps
            if known:
                newer = await steps(status=APPLIED_STEPS, after=known[-1].step - 1, last=MAX_STEPS)
                if newer and newer[0].id == known[-1].id:
                    return [*known[:-1], *newer]
            return await steps(status=APPLIED_STEPS, last=MAX_STEPS)

        return await self._cached("steps", read, 0.5)

    async def tasks(self) -> dict[tuple[str, int], dict[str, int]]:
        """Return (split, epoch) → status → Tasks."""
        return await self._cached("tasks", self._counts.tasks, stale=_STALE_SECONDS)

    async def _planned(self) -> StepRow | None:
        unfinished = (StepStatus.PLANNING, StepStatus.PLANNED)
        steps = await self._views.steps(status=unfinished, last=1)
        return steps[-1] if steps else None

    async def _cached(
        self, name: str, read: Callable[[], Awaitable[T]], seconds: float = _COUNT_SECONDS, stale: float = 0.0
    ) -> T:
        return await self._cache.get((name, self._store.run_name), seconds, read, stale=stale)


def stated_alive_seconds(configs: Configs) -> float | None:
    """Return the age of a heartbeat above which an engine is dead, if ``--heartbeat_seconds`` was given."""
    return configs[EngineConfig].alive_seconds if "heartbeat_seconds" in configs.given else None


def _flag(configurations: Sequence[RunSettings], name: str) -> Any:
    given = (configuration.values.get(name) for configuration in configurations)
    return next((value for value in given if value is not None), None)


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
_DIVERGED_WARN = 0.05
_TOOLS_NAMED = 3
_DRIFT = 0.1
"""Mean difference of a row of the gold slice that is told."""


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
            ("training", "good")
            if run.liveness.samplers or not _unfinished(run)
            else ("trainer only", "warn")
        )
    if run.finished:
        return "finished", "good"
    if run.liveness.samplers:
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
    return run.trainer_alive or bool(run.liveness.samplers)


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
    if run.trainer_alive and not run.liveness.samplers:
        last = run.liveness.last_claim
        age = f"; the last trajectory began {duration((run.at - last).total_seconds())} ago" if last else ""
        yield Finding(
            severity="warn",
            what=f"no sampler is alive{age}",
            hint="start one: agentrl sample; its log says why the last one ended",
        )
    elif run.liveness.samplers and not run.trainer_alive:
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
        doing = run.lease.doing
        is_waiting = doing is not None and doing.work is Work.WAITING
        yield Finding(
            severity="warn",
            what=f"the last step was {duration(since)} ago; a step usually takes {duration(usual)}"
            + (f"; the trainer is {doing.shown}" if doing else ""),
            hint="look at the ready groups, the engines, and the longest trajectory"
            if is_waiting
            else "the trainer's log says what takes so long",
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


def _continued(run: RunSnapshot) -> Iterator[Finding]:
    continued = run.continued
    if continued.poison:
        yield Finding(
            severity="warn",
            what=f"{continued.poison:,} trajectories failed as poison: each killed its samplers at one place",
            hint="agentrl audit records --failure poison names them; mend what kills a sampler there, then"
            " agentrl db reopen --failure_kind poison",
        )
    diverged, moved = continued.diverged, continued.trajectories
    if moved >= _FEW_ATTEMPTS and diverged > _DIVERGED_WARN * moved:
        yield Finding(
            severity="warn",
            what=f"{diverged:,} of {moved:,} trajectories that went on in another process diverged from their"
            f" journal, which dropped {continued.dropped:,} model calls",
            hint="let the agent ask for time, randomness and look-ups by rollout.once: docs/durable.md",
        )


def _answers_seen(run: RunSnapshot) -> Iterator[Finding]:
    """Yield one finding for all tools that had the answer of a task."""
    if not run.answers_seen:
        return
    tools = ", ".join(f"{each.tool} {each.count:,}" for each in run.answers_seen[:_TOOLS_NAMED])
    first = run.answers_seen[0]
    yield Finding(
        severity="warn",
        what=f"the task's answer stands in tool results of {sum(each.count for each in run.answers_seen):,}"
        f" trajectories, before the model wrote any of it: {tools}",
        hint=f"agentrl audit records --answer_seen_in {first.tool} lists them, such as {first.record}; if the"
        " tool may know it: --watch_answers none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldMean:
    """What a scorer gave the gold slice at one step, over the rows that it scored."""

    scorer: str
    step: int
    models: str
    """The judges that answered, comma-separated."""
    scores: Mapping[int, float]
    """By place in the file."""
    expected: Mapping[int, float]
    """What people gave all rows."""

    def mean(self, rows: Collection[int]) -> float:
        """Return the mean over some of the scored rows."""
        return fmean(self.scores[row] for row in rows)

    def distance(self, others: Mapping[int, float]) -> float:
        """Return the mean difference of a row: two opposite changes do not cancel. 0 without common rows."""
        rows = self.scores.keys() & others.keys()
        return fmean(abs(self.scores[row] - others[row]) for row in rows) if rows else 0.0


def gold_means(checks: Sequence[JudgeCheck]) -> list[GoldMean]:
    """Return the results of the newest slice by scorer and step, without those that scored nothing."""
    means = []
    for check in checks:
        if check.digest != checks[-1].digest:
            continue
        for scorer in sorted({row.scorer for row in check.scores}):
            rows = {place: row for place, row in enumerate(check.scores) if row.scorer == scorer}
            scores = {place: row.score for place, row in rows.items() if row.score is not None}
            models = ", ".join(sorted({row.model for row in rows.values() if row.model is not None}))
            expected = {place: row.expected for place, row in rows.items()}
            mean = GoldMean(scorer=scorer, step=check.step, models=models, scores=scores, expected=expected)
            means += [mean] if scores else []
    return means


def _judges(run: RunSnapshot) -> Iterator[Finding]:
    """Yield a finding for each scorer whose judge has changed, or disagrees with people."""
    means = gold_means(run.judge_checks)
    for scorer in dict.fromkeys(mean.scorer for mean in means):
        own = [mean for mean in means if mean.scorer == scorer]
        first, last = own[0], own[-1]
        rows = first.scores.keys() & last.scores.keys()
        named = f"the judge {scorer}" + (f" ({last.models})" if last.models else "")
        if (distance := last.distance(first.scores)) > _DRIFT:
            by = f" by {first.models}" if first.models != last.models else ""
            yield Finding(
                severity="warn",
                what=f"{named} gives the gold slice {last.mean(rows):.3f} at step {last.step}, and gave"
                f" {first.mean(rows):.3f} at step {first.step}{by}; a row differs by {distance:.3f}",
                hint="scores before and after are not alike: pin the judge's model, then agentrl db rescore",
            )
            continue
        people = fmean(last.expected[row] for row in last.scores)
        if (distance := last.distance(last.expected)) > _DRIFT:
            yield Finding(
                severity="warn",
                what=f"{named} gives the gold slice {last.mean(last.scores):.3f} at step {last.step}, and"
                f" people gave {people:.3f}; a row differs by {distance:.3f}",
                hint="change its prompt or its model: docs/scoring.md",
            )


_CHECKS: Sequence[Callable[[RunSnapshot], Iterator[Finding]]] = (
    _outages,
    _engines,
    _processes,
    _late,
    _means,
    _learning,
    _failures,
    _continued,
    _answers_seen,
    _judges,
)
