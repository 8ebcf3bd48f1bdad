"""Train the stored steps of a run again, as a child of it; no engine and no sampler is needed.

torch is imported where it computes, or else a wrong name would be refused only after seconds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agentrl.base.concurrency import end_tasks
from agentrl.base.user_code import allow
from agentrl.config.agreement import require_rewards
from agentrl.config.flags import require
from agentrl.config.load import Configs
from agentrl.config.schema import (
    CriticConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from agentrl.data.finalize_group import verifier
from agentrl.data.planner import build_micro_batches
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
    whitens_data,
)
from agentrl.documents.images import Image
from agentrl.documents.model_call import unpack_floats, unpack_halves
from agentrl.documents.run import PARENT, Relative, RunSettings
from agentrl.documents.task import record_task, scorer_weights
from agentrl.documents.training import (
    Checkpoint,
    DBRecordData,
    StepOrigin,
    TokenStatistics,
    TrainStep,
    readable_checkpoints,
)
from agentrl.errors import ConfigError, TrainingError, quoted
from agentrl.lab.flags import WhatIfConfig, changes, child_configs, of_steps, parent_configs
from agentrl.lab.rescore import SCORER, Regrouping, regrouping_of
from agentrl.losses.settings import LossSettings, check_loss
from agentrl.scoring.groups import ESTIMATORS, GROUP_FILTERS
from agentrl.scoring.scorers import require_scorer
from agentrl.store.client import Store, open_existing, open_store, run_exists
from agentrl.store.mechanics.connection import DATA, RECORD
from agentrl.weights.folder import base_folder

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

ORDER_SEED = "order_seed"
"""Key in ``Relative.changed`` of the seed that shuffles the order of the steps."""
_SAMPLED = (
    "reward", "pass_rate", "abandoned_fraction", "abandoned_groups", "masked_calls", "length_bias",
    "prefix_cache_hit_rate", "groups", "generate_seconds", "tool_seconds", "judge_seconds", "api_cost",
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
    store: Store, parent: Relative, configs: Configs, train_steps: Sequence[str], last: int | None
) -> RecordedStream:
    """Return the stream of the parent's steps that a what-if has still to train with these flags.

    ``train_steps`` are the ``_id`` of the steps in its weights. In another order the flags stay at their
    places, as the learning rate does: as many steps are trained with them as in the parent, up to ``last``.
    """
    source, last = store.beside(parent.run), last or parent.steps[-1]
    steps = [step for step in await source.steps.find(after=parent.step) if step.step <= parent.steps[-1]]
    ordered = order_steps(steps, parent)
    trained = await _trained_places(store, ordered, train_steps)
    until = sum(step.step <= last for step in steps)
    train, sampling = configs[TrainConfig], configs[SamplingConfig]
    scoring = Regrouping(
        scorer_timeout_seconds=sampling.scorer_timeout_seconds, agent_config_path=sampling.agent_config_path
    )
    settings = RecordedSettings(
        freshness=freshness_of(configs), whitens=whitens_data(configs),
        verifies=train.verify_data, regrouping=regrouping_of(parent, scoring), since=parent.since,
    )  # fmt: skip
    return RecordedStream(source, ordered[trained:until], settings, last=last)


async def _trained_places(store: Store, ordered: Sequence[TrainStep], train_steps: Collection[str]) -> int:
    """Return how many of the parent's steps, in the order of the what-if, are behind its ``train_steps``."""
    own = {step.id: step.recorded.step for step in await store.steps.find() if step.recorded is not None}
    done = {own[id] for id in train_steps if id in own}
    return max((place for place, step in enumerate(ordered, 1) if step.step in done), default=0)


def order_steps(steps: Sequence[TrainStep], relative: Relative) -> list[TrainStep]:
    """Return a parent's steps in the order in which a what-if trains them.

    With an order seed, those from ``relative.since`` on are shuffled. Data keep the ages that they had.
    """
    _, seed = relative.changed.get(ORDER_SEED, (0, 0))
    own = [step for step in steps if step.step >= relative.since]
    if seed:
        random.Random(seed).shuffle(own)
    return [*(step for step in steps if step.step < relative.since), *own]


Floats = NDArray[np.float32]


def token_weights(
    batch: StepData, stored: Mapping[str, TokenStatistics], settings: LossSettings, vocab_size: int
) -> dict[str, Floats]:
    """Return {record: −∂loss/∂log πθ} of the tokens that a step trained, float32[T] in the order of spans.

    Above 0, the update makes the token more likely. ``stored`` are the step's statistics by record;
    trajectories without some are left out. The KL to a reference and the entropy bonus are not counted.
    Empty for a loss that compares trajectories, whose tokens have no weight of their own.
    """
    import torch

    from agentrl.losses.compute import Denominators
    from agentrl.train.step import StepLoss

    if settings.loss.compares:
        return {}
    settings = replace(settings, kl_coef=0.0, kl_estimator="weighted_k3", entropy_coef=0.0)
    data = [
        item
        for item in batch.data
        if item.id in stored and len(stored[item.id].log_ratios) == 2 * item.trainable_tokens
    ]
    if not data:
        return {}
    whole = Denominators(sum(item.trainable_tokens for item in batch.data), float(len(batch.data)))
    loss = StepLoss(settings, whole, sum(item.tokens for item in batch.data))
    logprobs = [
        unpack_floats(item.behavior_logprobs) + unpack_halves(stored[item.id].log_ratios) for item in data
    ]
    weights = {item.id: np.zeros(item.trainable_tokens, np.float32) for item in data}
    forests = build_micro_batches(
        data, sum(item.tokens for item in data), vocab_size=vocab_size, merging="trajectory", ages=batch.ages
    )
    for forest in forests:
        places = list(zip(forest.trajectory[forest.row].tolist(), forest.label.tolist(), strict=True))
        values = torch.tensor([logprobs[number][label] for number, label in places], requires_grad=True)
        loss.add(forest, values, torch.zeros(len(places))).backward()  # type: ignore[no-untyped-call]
        assert values.grad is not None
        for (number, label), gradient in zip(places, values.grad.tolist(), strict=True):
            weights[data[number].id][label] = -gradient
    return weights


_OTHER_RANKS_SECONDS = 300.0
"""How long the other ranks wait until rank 0 has begun the child."""
_COMPARED = ("loss", "grad_norm", "lr", "kl_k3", "entropy", "reward")
"""Metrics of a step that do not depend on the time that it takes."""


def train_again(parent: str, child: str | None, here: Configs) -> str:
    """Train stored steps of the run ``parent`` with the flags that are given in ``here``; return the child.

    ``here`` has a WhatIfConfig too. ``child`` is its name; None: the next free one. The other flags are those
    that the parent's trainer had at the step. The steps between the parent's checkpoint and the first one
    are trained before, with the parent's flags. Every rank of a launch calls it; a second call goes on.
    Writes nothing of the parent but the note of its child. Raises
    ConfigError for steps that the parent does not have and for a child with other settings, TrainingError if
    data of the steps are gone.
    """
    begun = asyncio.run(_begin(parent, child, here))
    from agentrl.train.start import Part, run_trainer

    relative, *others, end = begun.relative, *begun.stretches
    run_trainer(
        *(Part(configs=item.child, last=item.last, threads=item.threads) for item in others),
        Part(configs=end.child, threads=end.threads),
    )
    is_same = not relative.changed and not relative.without
    asyncio.run(_report_equality(begun, relative.steps[-1] if is_same else relative.since - 1))
    return end.child[RunConfig].run_name


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps of a run that are trained with the same flags, as far as these decide a step."""

    parent: Configs
    """The flags of the trainer that made them."""
    child: Configs
    """Those with which they are trained again."""
    threads: int | None
    """Those of that trainer; None: it has not stored them."""
    last: int

    @property
    def flags(self) -> tuple[Any, ...]:
        """What all of its steps have in common."""
        return of_steps(self.parent), of_steps(self.child), self.threads


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A child that may be trained."""

    relative: Relative
    stretches: Sequence[Stretch]
    """What is left to train, one at least, in the child's folder and database."""


async def _begin(parent_name: str, child_name: str | None, here: Configs) -> _Begun:
    """Begin the child, or find it begun with the same settings."""
    run = replace(here[RunConfig], run_name=parent_name)
    async with await open_existing(run) as source:
        steps = await _trained_steps(source)
        wanted = await _wanted(source, here, steps)
        from agentrl.distributed.mesh import is_first_rank

        name = child_name or await _free_name(source, run, wanted)
        own = {"run_name": name, "output_dir": run.output_dir or f"output/{name}"}
        if is_first_rank():
            left = [step for step in steps if wanted.step < step.step <= wanted.steps[-1]]
            await _require_records(source, wanted.without)
            await require_data(source, left, frozenset(wanted.without))
            await _begin_child(source, wanted, replace(run, run_name=name))
        relative = await _await_child(source, wanted, name)
        left = [step for step in steps if relative.step < step.step <= relative.steps[-1]]
        found = await stretches(source, left, here, relative.since)
        found = [replace(item, child=item.child.with_flags(own)) for item in found]
    async with await open_store(found[-1].child[RunConfig]) as store:
        trained = await _trained(store, relative, found[-1].child, left)
    untrained = [item for item in found[:-1] if sum(step.step <= item.last for step in left) > trained]
    if untrained and untrained[0].last < relative.since:
        logger.info(
            "steps %d-%d are trained before, as %s trained them: %s",
            relative.step + 1, relative.since - 1, relative.run,
            f"{relative.checkpoint} is its last checkpoint below" if relative.checkpoint
            else "it has no checkpoint below, and they begin with the base model",
        )  # fmt: skip
    return _Begun(relative=relative, stretches=[*untrained, found[-1]])


async def stretches(source: Store, steps: Sequence[TrainStep], here: Configs, since: int) -> list[Stretch]:
    """Return ``steps``, in their order, by the flags of the trainer that made them.

    From step ``since`` on the flags that are given ``here`` are changed. Raises ConfigError for a step whose
    flags are not stored, and for flags with which none could be trained.
    """
    found: list[Stretch] = []
    stored = await stored_flags(source, steps)
    for (flags, is_own), part in groupby(steps, lambda step: (stored[step.id], step.step >= since)):
        parent = parent_configs(flags.values, flags.given, here)
        child = child_configs(parent, here) if is_own else parent
        if is_own:
            _require_usable(child, here.given)
        item = Stretch(parent=parent, child=child, threads=flags.threads, last=[*part][-1].step)
        if found and found[-1].flags == item.flags and (found[-1].last >= since) == is_own:
            del found[-1]
        found.append(item)
    return found


async def _wanted(source: Store, here: Configs, steps: Sequence[TrainStep]) -> Relative:
    """Return what the child is to its parent. Raises ConfigError for steps that the parent does not have."""
    flags = here[WhatIfConfig]
    first, last = flags.first_and_last or (1, steps[-1].step)
    require(
        last <= steps[-1].step,
        f"--steps ends with {last}, and run {source.run_name!r} has trained {steps[-1].step} steps",
        f"give steps up to {steps[-1].step}",
    )
    own = await stretches(source, [step for step in steps if first <= step.step <= last], here, first)
    changed: dict[str, Any] = {}
    for item in own:
        changed |= changes(item.parent, item.child, LossSettings.of_run(item.child))
    if flags.scorer is not None:
        allow(scorer_weights(flags.scorer))
        require_scorer(flags.scorer)
        changed[SCORER] = [None, flags.scorer]
    if flags.order_seed:
        changed[ORDER_SEED] = [0, flags.order_seed]
    found = _newest_below(await checkpoint_roots(source), steps, first - 1, own[-1].parent)
    return Relative(
        id=PARENT,
        run=source.run_name,
        kind="whatif",
        step=0 if found is None else found.state.step,
        checkpoint="" if found is None else str(found.folder.resolve()),
        steps=(first, last),
        since=first,
        without=tuple(sorted(flags.excluded)),
        changed=changed,
    )


def _require_usable(child: Configs, given: Collection[str]) -> None:
    """Raise ConfigError for flags with which no step could be trained, before the child is begun."""
    check_loss(child, given)
    if (critic := child[CriticConfig]).is_on:
        require_rewards(child)
        require(
            "scorer" not in given,
            f"--scorer with --critic {critic.critic}: it may reward roles, which a critic cannot tell apart",
            "score a copy of the run again (agentrl db rescore), and start another run from its model",
        )
    require(
        "max_staleness" not in given or child[TrainConfig].staleness_policy in ("mask", "decay"),
        "--max_staleness without a --staleness_policy that reads it: a stored step is trained whole, whatever"
        " its ages are",
        "add --staleness_policy mask or decay, or leave it out",
    )
    groups = child[GroupConfig]
    if "advantage" in given:
        ESTIMATORS.get(groups.advantage)
    if "group_filter" in given and groups.group_filter is not None:
        GROUP_FILTERS.get(groups.group_filter)


async def _require_records(source: Store, names: Sequence[str]) -> None:
    """Raise ConfigError for names of ``--without`` that neither the run nor an ancestor has."""
    missing = sorted(set(names).difference(await source.records.origins(names)))
    unknown = [name for name in missing if await source.ancestry.holder(RECORD, name) is None]
    require(
        not unknown,
        f"--without names {len(unknown)} Records that run {source.run_name!r} does not have, such as"
        f" {next(iter(unknown), '')!r}",
        f"`agentrl audit records --run_name {source.run_name}` lists them; write one `_id` a line",
    )


async def _trained_steps(source: Store) -> list[TrainStep]:
    """Return the committed steps of a run; ConfigError for a run without one, and for a what-if."""
    parent = await source.ancestry.parent()
    if parent is not None and parent.kind == "whatif":
        flags = " ".join(f"--{name} {quoted(new)}" for name, (_, new) in parent.changed.items())
        raise ConfigError(
            f"run {source.run_name!r} is a what-if itself: its data are those of {parent.run}",
            hint=f"train {parent.run}'s steps again: agentrl whatif {parent.run} {flags}".rstrip(),
        )
    steps = await source.steps.find()
    if not steps:
        raise ConfigError(
            f"run {source.run_name!r} has no trained step", hint="agentrl runs lists the runs and their steps"
        )
    return steps


async def stored_flags(source: Store, steps: Sequence[TrainStep]) -> dict[str, RunSettings]:
    """Return {``_id`` of a step: the flags of its trainer, with the rules of groups as samplers had them}."""
    found = await source.settings.of_steps(steps)
    if unknown := [step.step for step in steps if step.id not in found]:
        raise ConfigError(
            f"run {source.run_name!r} does not hold the flags of the trainer of step {unknown[0]}",
            hint="a run keeps them since its trainer first started; train it with this version of AgentRL",
        )
    groups = (await source.settings.all()).get("groups")
    rules = {} if groups is None else groups.values
    starts = {id(item): replace(item, values=item.values | rules) for item in found.values()}
    return {key: starts[id(item)] for key, item in found.items()}


async def checkpoint_roots(source: Store) -> list[Path]:
    """Return the folders that may hold a checkpoint of the run's weights: its trainers', its ancestors'."""
    ancestors = [Path(each.checkpoint).parent for each in await source.ancestry.lineage() if each.checkpoint]
    return [*await source.settings.checkpoint_folders(), *ancestors]


def _newest_below(
    roots: Sequence[Path], steps: Sequence[TrainStep], step: int, configs: Configs
) -> Checkpoint | None:
    """Return the newest checkpoint up to ``step`` with none but ``steps``; None: the base model."""
    from agentrl.train import checkpoint

    base = base_folder(configs[ModelConfig])
    known = {item.id for item in steps}
    found = [item for root in roots for item in readable_checkpoints(root) if item.state.step <= step]
    alive = [item for item in found if known.issuperset(item.state.train_steps)]
    newest = max(alive, key=lambda item: item.state.step, default=None)
    return None if newest is None else checkpoint.of_parent(newest.folder, base)


async def _free_name(source: Store, run: RunConfig, wanted: Relative) -> str:
    """Return the name of the child that was begun with the same settings; else the next free one."""
    for child in await source.ancestry.children():
        if _is_same(child, wanted):
            return child.run
    number = 1
    while await run_exists(replace(run, run_name=f"{source.run_name}_whatif_{number}")):
        number += 1
    return f"{source.run_name}_whatif_{number}"


def _is_same(one: Relative, other: Relative) -> bool:
    return (one.kind, one.steps, one.changed, one.without) == (
        other.kind, other.steps, other.changed, other.without,
    )  # fmt: skip


async def _begin_child(source: Store, wanted: Relative, child: RunConfig) -> None:
    """Create the child's database with the parent's settings. ConfigError if the name is another run's."""
    name = child.run_name
    async with await open_store(child) as store:
        begun = await store.ancestry.parent()
        if begun is not None and begun.run == wanted.run and _is_same(begun, wanted):
            return
        is_used = any((await store.tasks.counts("train")).values()) or await store.steps.find(status=None)
        if begun is not None or is_used:
            raise ConfigError(
                f"run {name!r} exists, and was not begun as this what-if of {wanted.run}",
                hint=f"give another name; `agentrl status {name}` shows that run",
            )
        for item in (await source.settings.all()).values():
            if item.id not in ("loss", "adapter", "rollouts", "critic"):  # its trainer stores these
                new = {key: wanted.changed.get(key, [None, value])[1] for key, value in item.values.items()}
                await store.settings.begin(item.id, new, "whatif")
        await store.ancestry.begin(wanted)


async def _await_child(source: Store, wanted: Relative, name: str) -> Relative:
    """Return the child's note of its parent; ranks other than 0 wait until rank 0 has written it."""
    try:
        async with asyncio.timeout(_OTHER_RANKS_SECONDS):
            while True:
                found = await source.beside(name).ancestry.parent()
                if found is not None and _is_same(found, wanted):
                    return found
                await asyncio.sleep(1.0)
    except TimeoutError as error:
        raise TrainingError(
            f"rank 0 has not begun run {name!r} within {_OTHER_RANKS_SECONDS:g} s", hint="see its log"
        ) from error


async def _report_equality(begun: _Begun, last: int) -> None:
    """Log whether the steps up to ``last``, trained as the parent's, have its metrics bit for bit."""
    from agentrl.distributed.mesh import is_first_rank

    if not is_first_rank():
        return
    async with await open_store(begun.stretches[-1].child[RunConfig]) as store:
        own = {step.recorded.step: step for step in await store.steps.find() if step.recorded is not None}
        steps = await store.beside(begun.relative.run).steps.find()
    pairs = [(step, own[step.step]) for step in steps if step.step in own and step.step <= last]
    for old, new in pairs:
        for name in _COMPARED:
            if old.metrics.get(name) != new.metrics.get(name):
                logger.warning(
                    "step %d is not the parent's bit for bit: %s is %s, and was %s. Another machine, another"
                    " number of processes or another torch rounds otherwise",
                    old.step, name, new.metrics.get(name), old.metrics.get(name),
                )  # fmt: skip
                return
    if pairs:
        logger.info("%d steps are those of %s bit for bit", len(pairs), begun.relative.run)


async def _trained(store: Store, relative: Relative, configs: Configs, left: Sequence[TrainStep]) -> int:
    """Return how many of the parent's steps ``left`` the newest checkpoint of the child has trained."""
    from agentrl.train import checkpoint

    steps = await store.steps.find(status=None)
    run, base = configs[RunConfig], base_folder(configs[ModelConfig])
    found = checkpoint.find(Path(run.output), "auto", steps, run_name=run.run_name, base=base)
    held = () if found is None else found.state.train_steps
    return await _trained_places(store, order_steps(left, relative), held)
