"""Stream the stored steps of a run again, in their order: the data of ``agentrl whatif``."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.base.concurrency import end_tasks
from agentrl.config.load import Configs
from agentrl.config.schema import SamplingConfig, TrainConfig
from agentrl.data.finalize_group import verifier
from agentrl.data.stream import (
    STEP_SOURCES,
    Freshness,
    StepData,
    VersionSteps,
    Window,
    freshness_of,
    images_of,
    trajectory_means,
    weigh,
)
from agentrl.documents.images import Image
from agentrl.documents.run import Relative
from agentrl.documents.task import record_task
from agentrl.documents.training import DBRecordData, StepOrigin, TrainStep
from agentrl.errors import TrainingError
from agentrl.lab.rescore import Regrouping, regrouping_of
from agentrl.store.mechanics.connection import DATA

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

ORDER_SEED = "order_seed"
"""Key in ``Relative.changed`` of the seed that shuffles the order of the steps."""
_SAMPLED = (
    "reward", "pass_rate", "abandoned_fraction", "abandoned_groups", "masked_calls", "length_bias",
    "prefix_cache_hit_rate", "groups",
)  # fmt: skip
"""Metrics of a step about sampling, which stays as it was."""
_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class RecordedSettings:
    """How stored steps are trained again."""

    freshness: Freshness
    whitens: bool = False
    verifies: bool = True
    """Whether stored data are compared with their groups; otherwise every writer is trusted."""
    regrouping: Regrouping = field(default_factory=Regrouping)
    since: int = 0
    """The first step of the parent that is regrouped; earlier ones are trained as they are stored."""


@dataclass(frozen=True)
class _Recorded:
    """The data of the step at ``index``, and what it reports of sampling."""

    index: int
    batch: StepData
    metrics: Mapping[str, Any]


class RecordedStream:
    """Train the steps of another run again: same groups, same order, same ages.

    A step whose groups have no trainable data left is passed over, and the next one is trained in its place.
    """

    max_staleness = sys.maxsize
    """Nothing samples these data, so nothing waits for newer weights."""

    def __init__(
        self, source: Store, steps: Sequence[TrainStep], settings: RecordedSettings, *, last: int
    ) -> None:
        """``steps`` are those of ``source`` up to ``last`` that are left to train, in order."""
        self.end = f"every step of {source.run_name} up to {last} is trained"
        self._source = source
        self._steps = steps
        self._settings = settings
        self._versions = VersionSteps(source)
        self._next = 0
        """Index of the first step that no call of ``take`` has returned."""
        self._reading: asyncio.Task[_Recorded | None] | None = None
        self._current: tuple[int, _Recorded | None] | None = None
        """The step of this run that is trained now, and its data: if it is skipped, it takes them again."""

    def prefetch(self, step: int) -> None:
        """Start to read the data of the next step."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_from(self._next))

    async def take(self, step: int) -> StepData | None:
        """Return the data of the next stored step; None after the last one.

        Raises TrainingError for data that fail verification or have no age, StoreError for data that are
        gone.
        """
        if self._current is None or self._current[0] != step:
            self.prefetch(step)
            assert self._reading is not None
            found = await self._reading
            self._reading, self._current = None, (step, found)
            self._next = len(self._steps) if found is None else found.index + 1
        found = self._current[1]
        return None if found is None else found.batch

    def avoid(self, data_ids: frozenset[str]) -> None:
        """Keep the order of the stored steps: a step that was skipped is trained again."""

    async def close(self) -> None:
        """Stop reading ahead."""
        if self._reading is not None:
            await end_tasks(self._reading)
            self._reading = None

    async def images(self, data: Sequence[DBRecordData]) -> Mapping[str, Image]:
        """Return the images of ``data`` by hash. Raises ImageError for one that is not stored."""
        return await images_of(self._source, data)

    async def window(self, batch: StepData) -> Window:
        """Return no groups: the parent has counted them."""
        return Window(groups=())

    async def report(self, step: int, batch: StepData, window: Window) -> dict[str, Any]:
        """Return what the parent's step reported of sampling; new rewards if groups were decided again."""
        found = None if self._current is None else self._current[1]
        return {} if found is None else dict(found.metrics)

    async def _read_from(self, first: int) -> _Recorded | None:
        for index in range(first, len(self._steps)):
            found = await self._read(index)
            if found.batch.data:
                return found
            logger.warning(
                "step %d of %s has no trainable data left: passed over",
                self._steps[index].step, self._source.run_name,
            )  # fmt: skip
        return None

    async def _read(self, index: int) -> _Recorded:
        settings, step = self._settings, self._steps[index]
        holder = await _holder(self._source, step)
        regrouping = settings.regrouping if step.step >= settings.since else Regrouping()
        tasks = list(dict.fromkeys(record_task(id) for id in step.data))
        again = {task for task in tasks if regrouping.concerns(task)}
        stored = await holder.training.fetch([id for id in step.data if record_task(id) not in again])
        if settings.verifies:
            await self._verify(holder, step, stored)
        decided = {task: await regrouping.decide(holder, task) for task in tasks if task in again}
        by_task: dict[str, list[DBRecordData]] = {
            task: sorted(found.outcome.data, key=lambda item: item.id) for task, found in decided.items()
        }
        for item in stored:
            by_task.setdefault(item.task, []).append(item)
        data = [item for task in tasks for item in by_task.get(task, ())]
        versions = {span.version for item in data for span in item.spans}
        ages = await self._versions.ages(versions, step.step - 1)
        if versions - ages.keys():
            raise TrainingError(
                f"step {step.step} of {self._source.run_name} cannot be trained again: version"
                f" {min(versions - ages.keys())}, which sampled some of its tokens, is not known",
                hint="leave the step out (--steps)",
            )
        batch = StepData(
            groups=tuple(task for task in tasks if by_task.get(task)),
            data=weigh(data, ages, settings.freshness, whitens=settings.whitens),
            ages=ages,
            is_rest=False,
            recorded=StepOrigin(run=holder.run_name, train_step=step.id, step=step.step),
            scores={id: score for found in decided.values() for id, score in found.scores.items()},
        )
        metrics = {name: step.metrics[name] for name in _SAMPLED if name in step.metrics}
        if decided:
            kept = [await holder.tasks.get(task) for task in tasks if task not in decided]
            summaries = [task.group for task in kept if task is not None and task.group is not None]
            metrics |= trajectory_means([*(found.outcome.summary for found in decided.values()), *summaries])
        return _Recorded(index, batch, metrics)

    async def _verify(self, holder: Store, step: TrainStep, data: Sequence[DBRecordData]) -> None:
        for task, problem in (await verifier(holder)(data)).items():
            raise TrainingError(
                f"step {step.step} of {self._source.run_name}, group {task}: {problem}",
                hint=f"agentrl db check --run_name {holder.run_name}; --verify_data false trusts the data",
            )


async def require_data(source: Store, steps: Sequence[TrainStep], without: Collection[str]) -> None:
    """Raise TrainingError, which names the steps, if data of ``steps`` are gone, except ``without``."""
    gone = []
    for step in steps:
        wanted = sorted(set(step.data).difference(without))
        holder = await _holder(source, step)
        if len(await holder.training.present(wanted)) < len(wanted):
            gone.append(step.step)
    if gone:
        listed = ", ".join(map(str, gone[:_LISTED])) + (", …" if len(gone) > _LISTED else "")
        raise TrainingError(
            f"run {source.run_name!r} no longer holds the data of {len(gone)} of its steps: {listed}",
            hint="give --steps without them; `agentrl db prune` keeps the data of the steps of a what-if from"
            " the moment it begins",
        )


async def _holder(source: Store, step: TrainStep) -> Store:
    """Return the store of the run that holds the step's data: ``source`` or one of its ancestors."""
    for id in step.data if step.inherited else ():
        if (holder := await source.holding(DATA, id)) is not None:
            return holder
    return source


@STEP_SOURCES.register("whatif")
async def open_recorded(
    store: Store, parent: Relative, configs: Configs, train_steps: Sequence[str], lead_in: int | None
) -> RecordedStream:
    """Return the stream of the parent's steps that a what-if has still to train.

    ``train_steps`` are the ``_id`` of the steps in its weights. ``lead_in`` is the last step before its own
    flags hold, where only the steps up to it are to be trained.
    """
    source = store.beside(parent.run)
    own = {step.id: step.recorded.step for step in await store.steps.find() if step.recorded is not None}
    done = {own[id] for id in train_steps if id in own}
    last = parent.steps[-1] if lead_in is None else lead_in
    steps = [step for step in await source.steps.find(after=parent.step) if step.step <= last]
    ordered = order_steps(steps, parent)
    trained = max((place for place, step in enumerate(ordered, 1) if step.step in done), default=0)
    train, sampling = configs[TrainConfig], configs[SamplingConfig]
    scoring = Regrouping(
        scorer_timeout_seconds=sampling.scorer_timeout_seconds, agent_config_path=sampling.agent_config_path
    )
    settings = RecordedSettings(
        freshness=freshness_of(configs), whitens=train.advantage_whitening == "batch",
        verifies=train.verify_data, regrouping=regrouping_of(parent, scoring), since=parent.since,
    )  # fmt: skip
    return RecordedStream(source, ordered[trained:], settings, last=last)


def order_steps(steps: Sequence[TrainStep], relative: Relative) -> list[TrainStep]:
    """Return a parent's steps in the order in which a what-if trains them.

    With an order seed, those from ``relative.since`` on are shuffled. Data keep the ages that they had.
    """
    _, seed = relative.changed.get(ORDER_SEED, (0, 0))
    own = [step for step in steps if step.step >= relative.since]
    if seed:
        random.Random(seed).shuffle(own)
    return [*(step for step in steps if step.step < relative.since), *own]
