"""Choose fresh groups for each step, and stream their data to the trainer; prefetch the next step's.

Ages are counted in optimizer steps: between the weights that sampled a token and those that train it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from agentrl.base.concurrency import end_tasks
from agentrl.base.registry import Registry
from agentrl.config.load import Configs
from agentrl.config.schema import CriticConfig, LossConfig, SamplingConfig, TrainConfig
from agentrl.documents.images import Image
from agentrl.documents.model_call import SamplingMask, pack_floats, unpack_floats
from agentrl.documents.record import TokenColumns
from agentrl.documents.status import DataStatus, TaskStatus
from agentrl.documents.training import DBRecordData, StepOrigin, TrainableSpan
from agentrl.errors import ConfigError, TrainingError
from agentrl.store.steps import ReadyMember, StaleVersions

if TYPE_CHECKING:
    from agentrl.data.finalize_group import Verify
    from agentrl.documents.run import Relative
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

POLL_SECONDS = 10.0
"""Interval between looks for data when the change stream reports none."""

LOG_EVERY_SECONDS = 30.0
_LOOKAHEAD_STEPS = 8
"""``groups_ready`` stops counting at the groups of this many steps."""
_LONGEST_PROBLEM = 500
"""Longest problem that is stored, in characters."""
_UNUSABLE_GROUPS = 8
"""Training stops after this many consecutive groups without trainable data: model or limits are wrong."""

StalenessPolicy = Literal["keep", "decay", "mask", "drop"]
SortKey = tuple[int, ...]
"""Sort key of a Task: the order in which groups begin (number, epoch, order)."""
_EPSILON = 1e-8
"""Added to the standard deviation."""
_NOISE = 1e-9
"""A standard deviation below this share of the largest advantage is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """``--staleness_policy``: how tokens are treated that are more than ``max_staleness`` steps old.

    The age of a token is the number of optimizer steps between the weights that sampled it and those that
    train it. ``keep``: nothing is stale; the loss clips older tokens by their ratio, as any other. ``decay``:
    nothing is stale; the advantage of an older token is multiplied by exp(−``decay``) for every step beyond
    ``max_staleness``. ``--out_of_date_decay`` narrows a token's bounds by the same factor for every step of
    its age. ``mask``: older tokens are not trained; data with no other tokens are stale. ``drop``: a group
    with an older token is stale as a whole.
    """

    max_staleness: int
    policy: StalenessPolicy = "keep"
    decay: float | None = None

    def __post_init__(self) -> None:
        if self.policy == "decay" and self.decay is None:
            raise ConfigError(
                "--staleness_policy decay needs the rate at which old tokens lose weight",
                hint="give it, e.g. --out_of_date_decay 0.5; or choose drop or mask",
            )

    @property
    def stale_spans(self) -> Literal["any", "all"] | None:
        """Return whether data are stale if any span is too old or if all spans are; None: never."""
        stale: dict[StalenessPolicy, Literal["any", "all"]] = {"drop": "any", "mask": "all"}
        return stale.get(self.policy)

    def oldest(self, step: int) -> int:
        """Return the earliest step whose tokens are fresh for weights after ``step`` steps."""
        return max(0, step - self.max_staleness)

    def weigh(self, data: DBRecordData, ages: Mapping[int, int]) -> DBRecordData:
        """Return ``data`` with old tokens masked or decayed; the same object if no token is old."""
        beyond = [max(0, ages[span.version] - self.max_staleness) for span in data.spans]
        if self.policy in ("keep", "drop") or not any(beyond):
            return data
        if self.policy == "mask":
            return _masked(data, beyond)
        rate = self.decay or 0.0
        spans = (
            replace(span, advantage=span.advantage * math.exp(-rate * steps))
            for span, steps in zip(data.spans, beyond, strict=True)
        )
        return replace(data, spans=tuple(spans))


def freshness_of(configs: Configs) -> Freshness:
    """Return how a trainer with these flags treats old tokens."""
    sampling = configs[SamplingConfig]
    return Freshness(
        max_staleness=0 if sampling.sync_sampling else sampling.max_staleness,
        policy=configs[TrainConfig].staleness_policy,
        decay=configs[LossConfig].out_of_date_decay,
    )


def _masked(data: DBRecordData, beyond: Sequence[int]) -> DBRecordData:
    """Turn spans that are too old into context: no loss and no denominator counts them."""
    ends = np.cumsum([span.end - span.start for span in data.spans])[:-1]
    logprobs = np.split(unpack_floats(data.behavior_logprobs), ends)
    mask = SamplingMask.unpack(data.sampling_mask, data.trainable_tokens)
    is_kept = np.concatenate(
        [np.full(len(part), steps == 0) for part, steps in zip(logprobs, beyond, strict=True)]
    )
    columns = TokenColumns.unpack(data.columns, data.trainable_tokens)
    spans = zip(data.spans, logprobs, beyond, strict=True)
    kept = [(span, part) for span, part, steps in spans if steps == 0]
    return replace(
        data,
        spans=tuple(span for span, _ in kept),
        trainable_tokens=sum(span.end - span.start for span, _ in kept),
        behavior_logprobs=pack_floats(np.concatenate([part for _, part in kept]) if kept else []),
        sampling_mask=mask.select(is_kept).pack(),
        columns=b"" if columns is None else columns.select(is_kept).pack(),
    )


def whitens_data(configs: Configs) -> bool:
    """Return whether a step's data are whitened; with a critic its advantages are, once they exist."""
    return configs[TrainConfig].advantage_whitening == "batch" and not configs[CriticConfig].is_on


def weigh(
    data: Sequence[DBRecordData], ages: Mapping[int, int], freshness: Freshness, *, whitens: bool
) -> tuple[DBRecordData, ...]:
    """Return a step's data with old tokens masked or decayed, and whitened advantages if it ``whitens``.

    Masking comes before whitening: no mean counts a masked token. Decay comes after it: otherwise whitening
    would turn a decayed advantage into −mean / std.
    """
    if whitens and freshness.policy == "decay":
        data = whiten(data)
    weighed = tuple(freshness.weigh(item, ages) for item in data)
    return whiten(weighed) if whitens and freshness.policy != "decay" else weighed


def choose_groups(
    members: Sequence[ReadyMember],
    count: int,
    order: Mapping[str, SortKey] | None = None,
    avoid: Collection[str] = (),
) -> dict[str, list[str]]:
    """Return at most ``count`` whole groups, {task: [data id, …]}, in the order in which they began.

    A slow group comes before groups that began later, even if they were ready sooner. Trained groups
    (``max_trained_count``) come after untrained ones. Among equals, groups without a key in ``order`` come
    last, in the order of ``members``. Groups with an id in ``avoid`` come after all others. The ids of a
    group are sorted, so the choice is deterministic.
    """
    groups: dict[str, list[str]] = {}
    trained: dict[str, int] = {}
    for member in members:
        groups.setdefault(member.task, []).append(member.id)
        trained[member.task] = max(member.trained_count, trained.get(member.task, 0))
    known = order or {}
    last = (math.inf,)

    def rank(task: str) -> tuple[bool, int, tuple[float, ...]]:
        return any(id in avoid for id in groups[task]), trained[task], known.get(task, last)

    return {task: sorted(groups[task]) for task in sorted(groups, key=rank)[:count]}


class VersionSteps:
    """Map each policy version to the step at which it was published, also if it was withdrawn later.

    Ages count from that step. When a trainer resumes, version numbers jump and steps go back; ages do
    neither. Each version is read once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._steps: dict[int, int] = {}
        """{version: step}, ascending."""

    async def ages(self, versions: Iterable[int], step: int) -> dict[int, int]:
        """Return {version: age} for weights after ``step`` steps, without versions never published."""
        wanted = set(versions)
        if not wanted <= self._steps.keys():
            await self._read()
        # Stop at 0: after a resume engines may still sample with a version of a later step.
        return {version: max(0, step - self._steps[version]) for version in wanted & self._steps.keys()}

    async def published_before(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return inclusive ranges of the versions published before ``step``, ascending."""
        await self._read()
        ranges: list[tuple[int, int]] = []
        is_open = False
        for version, published in self._steps.items():
            # Close a range at each fresh version: after a resume, higher numbers may be of earlier steps.
            is_old = published < step
            if is_old:
                ranges.append((ranges.pop()[0], version) if is_open else (version, version))
            is_open = is_old
        return tuple(ranges)

    async def _read(self) -> None:
        # Read only what is above the newest: what was read never changes, and a run may have thousands.
        newest = next(reversed(self._steps), -1)
        self._steps |= await self._store.policy_versions.steps_above(newest)


def whitened(advantages: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return A' = (A − mean) / (std + 1e-8), in float64; ``advantages[i]`` stands for ``tokens[i]`` tokens.

    Mean and standard deviation are over all n tokens: REINFORCE++ (arXiv 2501.03262). The variance is the
    population's, as in OpenRLHF; verl divides by n − 1 instead of n. The sums are exact and do not depend on
    the order. Equal advantages become 0; without a token they stay as they are.
    """
    total = sum(tokens)
    if total == 0:
        return list(advantages)
    mean = math.fsum(value * count for value, count in zip(advantages, tokens, strict=True)) / total
    centered = [value - mean for value in advantages]
    squares = (value**2 * count for value, count in zip(centered, tokens, strict=True))
    deviation = math.sqrt(math.fsum(squares) / total)
    if deviation <= _NOISE * max(map(abs, advantages)):
        return [0.0] * len(centered)
    return [value / (deviation + _EPSILON) for value in centered]


def whiten(data: Sequence[DBRecordData]) -> tuple[DBRecordData, ...]:
    """Return ``data`` with whitened advantages; the weight of a span is its number of tokens.

    Mean and deviation are of the advantages that the calls would have if none were faulty. A faulty call
    then gets its whitened advantage or 0, whichever is lower. The order of ``data`` changes no value.
    """
    spans = [(item, span) for item in data for span in item.spans]
    earned = [item.earned_advantage(span.call) for item, span in spans]
    advantages = iter(whitened(earned, [span.end - span.start for _, span in spans]))

    def of_span(item: DBRecordData, span: TrainableSpan) -> TrainableSpan:
        advantage = next(advantages)
        # Cap after whitening, which made +1.67 of a malformed call's 0.
        return replace(span, advantage=min(advantage, 0.0) if span.call in item.faulty_calls else advantage)

    return tuple(replace(item, spans=tuple(of_span(item, span) for span in item.spans)) for item in data)


@dataclass(frozen=True)
class StepData:
    """The groups of one step. ``is_rest``: sampling has ended and left fewer groups than a step takes."""

    groups: tuple[str, ...]
    data: tuple[DBRecordData, ...]
    ages: Mapping[int, int]
    """{version: age in optimizer steps}, for every policy version in ``data``."""
    is_rest: bool
    recorded: StepOrigin | None = None
    """The stored step that trained the data in another run; None for data of this run."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """New scores of Records that the other run scored otherwise, by ``_id``."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The groups, trained or abandoned, that a step reports on: the curve shows the policy, not the filter.

    These are the groups that no step has counted, finalized no later than the last of the step's own groups;
    if there are none, the step's own. ``commit_step`` marks them as counted, so that no group is in two
    windows.
    """

    groups: Sequence[Mapping[str, Any]]
    """``Task.group`` of each, with the Task's ``_id`` as ``task``."""

    @property
    def tasks(self) -> list[str]:
        """``_id`` of each group's Task."""
        return [group["task"] for group in self.groups]


class StepSource(Protocol):
    """What a trainer takes its data from: the live stream of its run, or one of ``STEP_SOURCES``."""

    end: str
    """What is true at the end of the data, as the log says it."""

    @property
    def max_staleness(self) -> int:
        """The most steps that training may be ahead of the published weights; sampling waits beyond it."""

    def prefetch(self, step: int) -> None:
        """Start to wait for the data of ``step``."""

    async def take(self, step: int) -> StepData | None:
        """Return the data of ``step``; None at the end of the data."""

    def avoid(self, data_ids: frozenset[str]) -> None:
        """Prefer groups other than those of ``data_ids``, whose step was skipped."""

    async def close(self) -> None:
        """Stop prefetching."""

    async def images(self, data: Sequence[DBRecordData]) -> Mapping[str, Image]:
        """Return the images of ``data`` by hash."""

    async def window(self, batch: StepData) -> Window:
        """Return the groups that the metrics of ``batch`` count."""

    async def report(self, step: int, batch: StepData, window: Window) -> dict[str, Any]:
        """Return what ``step`` reports of sampling and of its source."""


class OpenSource(Protocol):
    """Opens what a child trains of its ``parent``, behind its own ``train_steps`` (``_id``), under its flags.

    ``last`` is the last step of the parent that is trained with these flags; None: the child's last one.
    """

    async def __call__(
        self,
        store: Store,
        parent: Relative,
        configs: Configs,
        train_steps: Sequence[str],
        last: int | None,
    ) -> StepSource: ...


STEP_SOURCES: Registry[OpenSource] = Registry(
    "step source", group="agentrl.step_sources", built_in=("agentrl.lab.whatif_run",)
)
"""By the kinship of a run to its parent, for those that do not train what they sample."""


async def images_of(store: Store, data: Sequence[DBRecordData]) -> Mapping[str, Image]:
    """Return the images of ``data`` by hash. Raises ImageError for one that ``store`` does not hold."""
    named = {image.sha256 for item in data for image in item.images}
    return await store.images.get(named) if named else {}


async def step_window(store: Store, split: str, groups: Sequence[str]) -> Window:
    """Return the window of a step that trains ``groups``."""
    tasks = [await store.tasks.get(group) for group in groups]
    own = [
        {"task": task.id, "source": task.source, **task.group}
        for task in tasks
        if task is not None and task.group is not None
    ]
    end = max((group["finalized_at"] for group in own), default=None)
    uncounted = await store.groups.uncounted(split)
    within = [group for group in uncounted if end is None or group["finalized_at"] <= end]
    return Window(groups=within or own)


async def window_metrics(store: Store, window: Window, trained: Sequence[str]) -> dict[str, Any]:
    """Return ``trajectory_means``, ``masked_calls``, ``length_bias``, and what the trajectories took.

    ``masked_calls`` counts model calls that a sampling parameter excludes from training. ``length_bias`` is
    the mean number of generated tokens of the Records ``trained``, divided by that of all scored Records in
    the window, stale and filtered ones included. Below 1, training sees shorter trajectories than the policy
    generates. ``source_pass_rate`` is {source of a mixture: pass rate}. ``prefix_cache_hit_rate`` is the
    fraction of prompt tokens that engines did not compute again.
    """
    metrics: dict[str, Any] = trajectory_means(window.groups)
    metrics["masked_calls"] = sum(
        masked["calls"] for group in window.groups for masked in group.get("masked_calls", ())
    )
    by_source: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for group in window.groups:
        if group.get("source") is not None and group["scored"]:
            by_source[group["source"]].append(group)
    if by_source:
        metrics["source_pass_rate"] = {
            name: trajectory_means(groups)["pass_rate"] for name, groups in sorted(by_source.items())
        }
    sampled_mean = await store.training.mean_generated_tokens(tasks=window.tasks)
    trained_mean = await store.training.mean_generated_tokens(records=trained)
    if sampled_mean and trained_mean:
        metrics["length_bias"] = trained_mean / sampled_mean
    return {**metrics, **await store.training.spent(window.tasks)}


def trajectory_means(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over every scored trajectory of the groups; empty without one.

    The keys are ``reward``, ``pass_rate``, ``abandoned_fraction`` (trajectories that did not become training
    data) and ``abandoned_groups`` (groups without any training data, because their scores agree).
    """
    scored = sum(summary["scored"] for summary in summaries)
    if not scored:
        return {}
    return {
        "reward": sum(s["mean_score"] * s["scored"] for s in summaries if s["scored"]) / scored,
        "pass_rate": sum(s["pass_rate"] * s["scored"] for s in summaries if s["scored"]) / scored,
        "abandoned_fraction": 1 - sum(s["trained"] for s in summaries) / scored,
        "abandoned_groups": sum(not s["trained"] for s in summaries) / len(summaries),
    }


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """How data are chosen, and how long the stream waits for them."""

    split: str = "train"
    groups_per_step: int
    num_epochs: int
    freshness: Freshness
    max_trained_count: int = 1
    whitens: bool = False
    """``batch``: whiten the advantages once, over all data of a step."""
    wait_seconds: float
    problem_of: Callable[[DBRecordData], str | None] = lambda _: None
    """Returns why data cannot be trained, or None. Called in a worker thread before a step is planned."""
    engine_alive_seconds: float = 10.0


class DataStream:
    """Choose whole groups, oldest first, that are fresh enough for the weights that a step starts from.

    Step n starts from weights after n − 1 steps, published or not; ages count from them. A group that becomes
    ready after the next step was prefetched comes first in the step behind it. A step that was undone takes
    the same data again: they were fresh.
    """

    end = "every group is sampled, and trained or abandoned"

    def __init__(
        self,
        store: Store,
        settings: StreamSettings,
        replay: Mapping[int, tuple[str, ...]] | None = None,
        *,
        verify: Verify | None = None,
        attempt: int | None = None,
    ) -> None:
        """``replay`` holds the data of undone steps: {step: (data id, …)}.

        ``verify`` checks groups before their first step; groups with a problem are quarantined. None trusts
        every writer. ``attempt`` is the trainer's, and fences its writes.
        """
        self._verify = verify
        self._attempt = attempt
        self._store = store
        self._versions = VersionSteps(store)
        self._settings = settings
        self._replay = dict(replay or {})
        self._stale = 0
        self._prefetched: tuple[int, asyncio.Task[StepData | None]] | None = None
        self._awaited: int | None = None
        """The step whose data were asked for last: the step before it is committed."""
        self._avoid: frozenset[str] = frozenset()
        self._quarantined = 0
        self._unusable_groups = 0
        """Consecutive groups without trainable data."""

    @property
    def max_staleness(self) -> int:
        """The largest age of the tokens of fresh data, in optimizer steps."""
        return self._settings.freshness.max_staleness

    def prefetch(self, step: int) -> None:
        """Start to wait for the data of ``step``."""
        self._prefetched = (step, asyncio.create_task(self._wait(step)))

    async def take(self, step: int) -> StepData | None:
        """Return the data of ``step``; None when everything is sampled and trained.

        Marks data that are too old as stale. Raises TrainingError after ``wait_seconds``.
        """
        self._awaited = step
        await self._mark_stale(step)
        try:
            async with asyncio.timeout(self._settings.wait_seconds):
                return await self._take(step)
        except TimeoutError as error:
            raise await self._no_data() from error

    def avoid(self, data_ids: frozenset[str]) -> None:
        """Prefer groups other than those of ``data_ids``, whose step was skipped."""
        self._avoid = data_ids
        self._replay = {step: ids for step, ids in self._replay.items() if data_ids.isdisjoint(ids)}

    def count_stale(self) -> int:
        """Return the number of trajectories marked stale since the last call."""
        stale, self._stale = self._stale, 0
        return stale

    def count_quarantined(self) -> int:
        """Return the number of trajectories quarantined since the last call."""
        quarantined, self._quarantined = self._quarantined, 0
        return quarantined

    async def close(self) -> None:
        """Stop prefetching."""
        if self._prefetched is not None:
            task = self._prefetched[1]
            self._prefetched = None
            await end_tasks(task)

    async def images(self, data: Sequence[DBRecordData]) -> Mapping[str, Image]:
        """Return the images of ``data`` by hash. Raises ImageError for one that is not stored."""
        return await images_of(self._store, data)

    async def window(self, batch: StepData) -> Window:
        """Return the groups that the metrics of ``batch`` count."""
        return await step_window(self._store, self._settings.split, batch.groups)

    async def report(self, step: int, batch: StepData, window: Window) -> dict[str, Any]:
        """Return what ``step`` reports of sampling, and of groups and trajectories in the stream."""
        return {
            **await window_metrics(self._store, window, [item.record for item in batch.data]),
            "stale_trajectories": self.count_stale(),
            "quarantined_trajectories": self.count_quarantined(),
            "groups": len(batch.groups),
            "groups_open": await self._store.groups.count_open(self._settings.split),
            "groups_ready": len(
                await self._choose(step + 1, _LOOKAHEAD_STEPS * self._settings.groups_per_step)
            ),
        }

    async def _take(self, step: int) -> StepData | None:
        if self._prefetched is not None and self._prefetched[0] == step:
            result = await self._prefetched[1]
            self._prefetched = None
            # Choose a rest or an end anew: the step before was not committed when this was found.
            if result is not None and not result.is_rest:
                return result
        await self.close()
        return await self._wait(step)

    async def _wait(self, step: int) -> StepData | None:
        count = self._settings.groups_per_step
        log_at = time.monotonic() + LOG_EVERY_SECONDS
        while True:
            planned = await self._replayed(step)
            if planned is not None:
                return planned
            # Ask before choosing: a group that is finalized between the two is then chosen, not missed.
            finished = await self._sampling_finished()
            groups = await self._choose(step, count)
            if not groups and finished:
                return None
            if len(groups) == count or finished:
                data = await self._usable(groups, step)
                if data is None:
                    continue
                return await self._step_data(data, step, is_rest=len(groups) < count)
            if step != self._awaited:  # a prefetch: the trainer computes, and waits for nothing
                log_at = time.monotonic() + LOG_EVERY_SECONDS
            elif time.monotonic() >= log_at:
                settings, columns = self._settings, await self._unfilled()
                alive = await self._store.services.liveness(settings.split, settings.engine_alive_seconds)
                logger.info(
                    "waiting for groups: %d of %d are ready; %s%s", len(groups), count, columns,
                    alive.describe(),
                )  # fmt: skip
                log_at += LOG_EVERY_SECONDS
            await self._store.wait_for_change("DBRecordData", "Task", timeout=POLL_SECONDS)
            # Mark what ended too old: admission counts it as open, and the step may need groups in its place.
            # A prefetch marks nothing: the step before may be undone, and its data are fresh for it.
            if step == self._awaited:
                await self._mark_stale(step)

    async def _unfilled(self) -> str:
        """Return how many trajectories wait for a column; empty if none does."""
        count = sum((await self._store.columns.waiting()).values())
        return f"{count} trajectories wait for a column (`agentrl teach`); " if count else ""

    async def _mark_stale(self, step: int) -> None:
        old = await self._too_old(step)
        # Mark nothing while undone steps are ahead: they train the same data again, which must stay ready.
        if old is None or any(undone >= step for undone in self._replay):
            return
        split, max_staleness = self._settings.split, self._settings.freshness.max_staleness
        stale = await self._store.training.mark_stale(split, old, attempt=self._attempt)
        if stale:
            self._stale += stale
            logger.info("%d trajectories are older than %d steps: stale", stale, max_staleness)

    async def _too_old(self, step: int) -> StaleVersions | None:
        """Return the versions that are too old in ``step``; None if the policy makes no data stale."""
        freshness = self._settings.freshness
        if freshness.stale_spans is None:
            return None
        ranges = await self._versions.published_before(freshness.oldest(step - 1))
        return StaleVersions(ranges, freshness.stale_spans)

    async def _choose(self, step: int, count: int) -> dict[str, list[str]]:
        """Return at most ``count`` whole groups; reads trained groups only if there are too few others."""
        settings = self._settings
        old = await self._too_old(step)
        groups: dict[str, list[str]] = {}
        for untrained in (True, False):
            members = await self._store.training.ready_members(
                settings.split, step=step, max_trained_count=settings.max_trained_count, old=old,
                untrained=untrained,
            )  # fmt: skip
            order = await self._store.tasks.sort_keys({member.task for member in members})
            groups = choose_groups(members, count, order, self._avoid)
            if len(groups) == count and self._avoid.isdisjoint(id for ids in groups.values() for id in ids):
                break
        return groups

    async def _replayed(self, step: int) -> StepData | None:
        """Return the data that ``step`` took before; None if there are none or if some are not ready now.

        Leaves out data that can no longer be trained.
        """
        ids = self._replay.get(step)
        if not ids:
            return None
        found, problems = await self._read(ids, step)
        await self._quarantine(problems)
        data = [found[id] for id in ids if id in found and id not in problems]
        data = [item for item in data if item.status is not DataStatus.QUARANTINED]
        if len(found.keys() | problems.keys()) < len(ids) or any(
            item.status is not DataStatus.READY for item in data
        ):
            logger.info("step %d cannot train the data it trained before: some of them are taken", step)
            return None
        return await self._step_data(data, step, is_rest=False) if data else None

    async def _usable(self, groups: Mapping[str, Sequence[str]], step: int) -> list[DBRecordData] | None:
        """Return the data of ``groups``; None if some were quarantined or have changed: choose again."""
        ids = [id for members in groups.values() for id in members]
        found, problems = await self._read(ids, step)
        for members in groups.values():
            unusable = all(id in problems for id in members)
            self._unusable_groups = self._unusable_groups + 1 if unusable else 0
        if self._unusable_groups >= max(_UNUSABLE_GROUPS, self._settings.groups_per_step):
            key, why = next(iter(problems.items()))
            raise TrainingError(
                f"no trajectory of the last {self._unusable_groups} groups can be trained; {key}: {why}",
                hint="give engines and the trainer the same model (--model_name_or_path) and limits",
            )
        await self._quarantine(problems)
        if problems or len(found) < len(ids):
            return None
        data = [found[id] for id in ids]
        unproven = {} if self._verify is None else await self._verify(data)
        for task, problem in unproven.items():
            count = await self._store.training.quarantine({"task": task}, problem, attempt=self._attempt)
            self._quarantined += count
            logger.error(
                "%d trajectories of group %s are not trained: %s (agentrl db check)", count, task, problem
            )
        return None if unproven else data

    async def _read(self, ids: Sequence[str], step: int) -> tuple[dict[str, DBRecordData], dict[str, str]]:
        """Return data by id, and the problem of each document that ``step`` cannot train."""
        found, problems = await self._store.training.fetch_readable(ids)
        ready = [item for item in found.values() if item.status is DataStatus.READY]
        # Check before a step is planned: one bad id or NaN stopped the trainer at every start.
        why = await asyncio.to_thread(lambda: {item.id: self._settings.problem_of(item) for item in ready})
        problems |= {id: problem for id, problem in why.items() if problem is not None}
        ages = await self._ages(ready, step)
        for item in ready:
            unknown = {span.version for span in item.spans} - ages.keys()
            if unknown:
                problems.setdefault(item.id, f"no policy version {min(unknown)} was published: it has no age")
        return found, problems

    async def _ages(self, data: Sequence[DBRecordData], step: int) -> dict[int, int]:
        """Return {version: age} of the published versions in ``data``."""
        return await self._versions.ages({span.version for item in data for span in item.spans}, step - 1)

    async def _quarantine(self, problems: Mapping[str, str]) -> None:
        for id, why in problems.items():
            logger.error("trajectory %s is quarantined, and its group is trained without it: %s", id, why)
            self._quarantined += await self._store.training.quarantine(
                {"_id": id}, why[:_LONGEST_PROBLEM], attempt=self._attempt
            )

    async def _step_data(self, data: Sequence[DBRecordData], step: int, *, is_rest: bool) -> StepData:
        groups, ages = tuple(dict.fromkeys(item.task for item in data)), await self._ages(data, step)
        settings = self._settings
        return StepData(
            groups, weigh(data, ages, settings.freshness, whitens=settings.whitens), ages, is_rest
        )

    async def _sampling_finished(self) -> bool:
        """Return whether every epoch holds every task and all groups are finalized."""
        split = self._settings.split
        # Ask for epochs too: one that is not open yet has no tasks, so none of them is unfinished.
        if await self._store.epochs.due(split, self._settings.num_epochs):
            return False
        unfinished = (TaskStatus.CREATED, TaskStatus.RUNNING, TaskStatus.WAITING)
        # Do not count them: each look for data would then read a key for each task of the run.
        return not await self._store.tasks.any_with_status(split, *unfinished)

    async def _no_data(self) -> TrainingError:
        counts = await self._store.tasks.counts(self._settings.split)
        listed = ", ".join(f"{number} {status}" for status, number in counts.items()) or "none"
        return TrainingError(
            f"fewer than {self._settings.groups_per_step} groups became ready within"
            f" {self._settings.wait_seconds:g} s; {await self._unfilled()}tasks: {listed}",
            hint="check that `agentrl serve` and `agentrl sample` run (`agentrl audit run` shows them), then"
            " start the trainer again: it resumes; or raise --data_wait_seconds",
        )
