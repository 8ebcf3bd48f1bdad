"""Estimate how far each trained trajectory moved the score of held-out tasks between two evaluations.

A step adds −lr·P·Σ∇ℓ to the weights, where ℓ is a trajectory's part of the loss and P the scale of AdamW. To
first order the trajectory changes a function with gradient v by lr·⟨P·v, −∇ℓ⟩ (TracIn, arXiv 2002.08484; with
AdamW's scale: LESS, arXiv 2402.04333). All trajectories are compared with one direction, so the inner product
is computed as it is: a random projection would save no gradient, and add an error.
"""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import gc
import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from rich.console import Console, Group
from torch import Tensor, nn

from agentrl.config.agreement import public_flags
from agentrl.config.flags import require
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AdapterConfig,
    CriticConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from agentrl.data.finalize_group import to_training_data
from agentrl.data.planner import packing_problem
from agentrl.data.stream import VersionSteps, freshness_of, images_of, weigh
from agentrl.distributed.fsdp import local_part
from agentrl.documents.images import Image
from agentrl.documents.run import Evaluation, PolicyVersion, RunSettings
from agentrl.documents.status import VersionStatus
from agentrl.documents.task import task_key
from agentrl.documents.training import Checkpoint, DBRecordData, TrainStep
from agentrl.errors import ConfigError
from agentrl.evaluation.policy import of_published
from agentrl.evaluation.report import evaluated_tasks, find
from agentrl.lab.flags import BlameConfig, parent_configs
from agentrl.lab.whatif_run import stored_flags
from agentrl.model.logprobs import ForwardOptions
from agentrl.observe.progress import Parts
from agentrl.observe.terminal import MISSING, excerpt, plain, table_of, versions
from agentrl.scoring.evaluation import Estimate, estimates
from agentrl.store.client import open_existing
from agentrl.store.records import RecordOrigin
from agentrl.train import checkpoint
from agentrl.train.build import build_trainer
from agentrl.train.step import PolicyTrainer, StepLoss, explain_out_of_memory, split_updates
from agentrl.weights.folder import architecture, base_folder
from agentrl.weights.local_copy import LocalCopy, weights_dir

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

Images = Mapping[str, Image]
_NO_IMAGES: Images = MappingProxyType({})


@dataclass(frozen=True)
class Direction:
    """A direction in the space of the trained weights: float32 numbers for each parameter, on its device."""

    parts: Sequence[tuple[nn.Parameter, Tensor]]

    def take_product(self) -> float:
        """Return the inner product with the parameters' gradients, and clear these."""
        products = []
        for parameter, numbers in self.parts:
            if parameter.grad is not None:
                products.append((local_part(parameter.grad).float() * numbers).sum(dtype=torch.float64))
                parameter.grad = None
        return float(torch.stack(products).sum()) if products else 0.0

    def scaled_by(self, optimizer: torch.optim.Optimizer) -> Direction:
        """Return the direction divided by AdamW's √v̂ + ε, element by element.

        A parameter without moments keeps its numbers at the mean scale of the others.
        """
        scales: list[Tensor | None] = []
        groups = {id(item): group for group in optimizer.param_groups for item in group["params"]}
        for parameter, numbers in self.parts:
            state = optimizer.state.get(parameter, {})
            if "exp_avg_sq" not in state:
                scales.append(None)
                continue
            group = groups[id(parameter)]
            moment = local_part(state["exp_avg_sq"]).to(numbers.device).float()
            corrected = moment / (1 - group["betas"][1] ** float(state["step"]))
            scales.append(1 / (corrected.sqrt() + group["eps"]))
        known = [scale for scale in scales if scale is not None]
        mean = float(torch.stack([scale.mean() for scale in known]).mean()) if known else 1.0
        pairs = zip(self.parts, scales, strict=True)
        return Direction([
            (parameter, numbers * (mean if scale is None else scale)) for (parameter, numbers), scale in pairs
        ])  # fmt: skip


def likelihood_direction(
    trainer: PolicyTrainer, data: Sequence[DBRecordData], images: Images = _NO_IMAGES
) -> Direction:
    """Return the gradient of Σ A·log πθ over the trainable tokens of ``data``, with A their advantages.

    With advantages that are scores less their mean, this is the policy gradient of the score. Blocks.
    """
    trainer.model.train()
    trainer.model.zero_grad(set_to_none=True)
    forests = trainer.pack(data, images=images)
    with explain_out_of_memory(trainer.memory, trainer.max_tokens):
        for forest, (logprobs, *_) in trainer.model.micro_batches(forests, trainer.options):
            advantage = torch.from_numpy(forest.advantage).to(logprobs.device)
            torch.autograd.backward((advantage * logprobs).sum())
    parts = [
        (item, local_part(item.grad).float().clone())
        for item in trainer.model.parameters()
        if item.grad is not None
    ]
    trainer.model.zero_grad(set_to_none=True)
    return Direction(parts)


def influences(
    trainer: PolicyTrainer,
    data: Sequence[DBRecordData],
    direction: Direction,
    ages: Mapping[int, int] | None = None,
    images: Images = _NO_IMAGES,
) -> dict[str, float]:
    """Return {id: ⟨direction, −∇ℓ⟩} of the data of one step, with ℓ a trajectory's part of the step's loss.

    ``data``, ``ages`` and ``images`` are those of ``PolicyTrainer.train``. The loss is computed over the
    whole update, as in training, so clips, corrections and denominators are those of the step; then each
    trajectory runs by itself. Memory: one gradient beside the direction. The weights do not change. Each pass
    of ``--num_epochs_per_batch`` counts as the first one. Blocks.
    """
    options = replace(trainer.options, entropy_gradient=trainer.settings.entropy_coef > 0)
    found = {item.id: 0.0 for item in data}
    trainer.model.train()
    trainer.model.zero_grad(set_to_none=True)
    with explain_out_of_memory(trainer.memory, trainer.max_tokens):
        for part in split_updates(trainer.settings.loss.choose(data), trainer.mini_batches):
            for item, slope in zip(part, _slopes(trainer, part, ages, images, options), strict=True):
                if slope.any():
                    _backward(trainer, item, slope, ages, images, options)
                    found[item.id] = -trainer.epochs * direction.take_product()
    return found


def _slopes(
    trainer: PolicyTrainer,
    data: Sequence[DBRecordData],
    ages: Mapping[int, int] | None,
    images: Images,
    options: ForwardOptions,
) -> Sequence[Tensor]:
    """Return the derivatives of an update's loss by the logprob and the entropy of each trainable token.

    float32[2, trainable tokens] for each of ``data``, in the order of its spans.
    """
    frozen = replace(trainer.frozen, start=False)  # the logprobs of the start are those of these weights
    forests = frozen.attach(trainer.model, trainer.pack(data, ages, images), trainer.options)
    loss = StepLoss.start(trainer.model, forests, trainer.settings, options, data=data)
    sizes = [item.trainable_tokens for item in data]
    first = np.cumsum(sizes) - sizes
    slopes = torch.zeros(2, sum(sizes), device=trainer.policy.model.device)
    for forest in forests:
        if not forest.trainable_tokens:
            continue
        with torch.no_grad():
            values = trainer.model(forest, options)
        logprobs, entropy = (value.detach().float().requires_grad_() for value in values)
        torch.autograd.backward(loss.add(forest, logprobs, entropy))
        index = torch.from_numpy(first[forest.trajectory[forest.row]] + forest.label).to(slopes.device)
        for row, leaf in enumerate((logprobs, entropy)):
            if leaf.grad is not None:
                slopes[row, index] = leaf.grad
    return torch.split(slopes, sizes, dim=1)


def _backward(
    trainer: PolicyTrainer,
    item: DBRecordData,
    slope: Tensor,
    ages: Mapping[int, int] | None,
    images: Images,
    options: ForwardOptions,
) -> None:
    """Leave the gradient of one trajectory's part of the loss, which has the derivatives ``slope``."""
    forests = trainer.pack([item], ages, images)
    for forest, (logprobs, entropy) in trainer.model.micro_batches(forests, options):
        label = torch.from_numpy(forest.label).to(slope.device)
        part = (slope[0, label] * logprobs).sum()
        if options.entropy_gradient:
            part = part + (slope[1, label] * entropy).sum()
        torch.autograd.backward(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTask:
    """A held-out task of both evaluations whose mean score changed."""

    task_id: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """Return after − before."""
        return self.after - self.before


async def changed_tasks(
    store: Store, configs: Configs, a: Evaluation, b: Evaluation, which: Literal["fell", "rose", "all"]
) -> list[ChangedTask]:
    """Return the tasks of both evaluations whose mean score ``fell``, ``rose``, or changed at all."""
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for evaluation in (a, b):
        for task in await evaluated_tasks(store, configs, evaluation):
            if task.scores:
                scores[task.task_id, task.digest].append(statistics.fmean(task.scores))
    both = [
        ChangedTask(task_id=task_id, before=means[0], after=means[1])
        for (task_id, _), means in scores.items()
        if len(means) == 2
    ]
    if not both:
        raise ConfigError(
            f"{a.id} and {b.id} have no scored task in common",
            hint="evaluate both versions on the same --eval_file",
        )
    wanted = {"fell": (-1,), "rose": (1,), "all": (-1, 1)}[which]
    changed = [task for task in both if (task.change > 0) - (task.change < 0) in wanted]
    if not changed:
        raise ConfigError(
            f"the mean score of no task {'changed' if which == 'all' else which} from {a.id} to {b.id}"
            f" ({len(both)} tasks)",
            hint="--changes all explains any change; more --eval_samples tell small changes apart",
        )
    return changed


async def held_out_data(
    store: Store, configs: Configs, evaluations: Sequence[Evaluation], tasks: Sequence[ChangedTask]
) -> tuple[list[DBRecordData], Images]:
    """Return the trajectories of ``tasks`` in both evaluations as training data, and their images.

    The advantage of trajectory i of task t is w·(s_i − mean score of t)/n with n trajectories of t and
    w = change of t / Σ|change|. So Σ A·∇log π estimates the policy gradient of Σ w·score: along it tasks
    change as they did.
    """
    total = sum(abs(task.change) for task in tasks)
    rules = GroupConfig(drop_zero_advantage=False)
    vocab_size = int(architecture(base_folder(configs[ModelConfig]))["vocab_size"])
    limit = configs[TrainConfig].max_tokens
    data: list[DBRecordData] = []
    for task in tasks:
        groups = [await store.groups.stored(task_key(item.id, 0, task.task_id)) for item in evaluations]
        scored = [
            (group, record, record.score)
            for group in groups
            if group is not None
            for record in group.records
            if record.score is not None and record.id in group.calls
        ]
        mean = statistics.fmean(score for _, _, score in scored)
        for group, record, score in scored:
            advantage = task.change / total * (score - mean) / len(scored)
            calls = group.calls[record.id]
            made = to_training_data(group.task, record, calls, advantage, rules, supervised=True)
            if made and packing_problem(made, vocab_size=vocab_size, max_tokens=limit) is None:
                data.append(made)
    if not any(item.advantage for item in data):
        raise ConfigError(
            "no trajectory of the evaluations can be read: their model calls are deleted",
            hint="evaluate both versions again",
        )
    return data, await images_of(store, data)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Stored weights after ``step`` optimizer steps; those of the base model if nothing is named."""

    step: int
    checkpoint: Checkpoint | None = None
    version: PolicyVersion | None = None


async def available_weights(store: Store, configs: Configs, roots: Sequence[Path]) -> list[Weights]:
    """Return the stored weights: base model, checkpoints (of parents too), versions of what is trained.

    ``roots`` are the run's folders of checkpoints, the newest trainer's first.
    """
    found = {0: Weights(0)}
    encodings = {"adapter"} if configs[AdapterConfig].lora_rank > 0 else {"full", "delta"}
    for version in await store.policy_versions.all():
        is_there = version.status is VersionStatus.PUBLISHED and of_published(version).is_stored
        if is_there and version.step > 0 and version.encoding in encodings:
            found[version.step] = Weights(version.step, version=version)
    steps = await store.steps.find(status=None)
    run = configs[RunConfig]
    for root in reversed(roots):
        try:
            for item in checkpoint.usable(root, steps, run_name=run.run_name):
                found[item.state.step] = Weights(item.state.step, checkpoint=item)
        except ConfigError as error:
            if root == roots[0]:
                raise
            logger.warning("%s, of an earlier start, is left out: %s", root, error.message)
    base = base_folder(configs[ModelConfig])
    for relative in await store.ancestry.lineage():
        if relative.checkpoint:
            begun = checkpoint.of_parent(Path(relative.checkpoint), base)
            found.setdefault(relative.step, Weights(relative.step, checkpoint=begun))
    return sorted(found.values(), key=lambda item: item.step)


def assign_weights(
    steps: Sequence[TrainStep], available: Sequence[Weights], limit: int
) -> dict[Weights, list[TrainStep]]:
    """Return the nearest weights to those that each step began with, at most ``limit``, with their steps.

    Step n began with the weights after n − 1 steps. Above ``limit``, weights are left out evenly.
    """
    nearest = _assign(steps, available)
    if len(nearest) <= limit:
        return nearest
    used = list(nearest)
    return _assign(steps, [used[(2 * number + 1) * len(used) // (2 * limit)] for number in range(limit)])


def _assign(steps: Sequence[TrainStep], available: Sequence[Weights]) -> dict[Weights, list[TrainStep]]:
    assigned: dict[Weights, list[TrainStep]] = {}
    for step in steps:
        nearest = min(available, key=lambda item: (abs(item.step - step.step + 1), item.step))
        assigned.setdefault(nearest, []).append(step)
    return assigned


def build_at(
    configs: Configs, folder: Path | None, weights: Weights, moments: Checkpoint | None
) -> PolicyTrainer:
    """Return the run's trainer with ``weights``, and with the optimizer's state of ``moments``."""
    trainer = build_trainer(configs, weights=folder, total_steps=max(1, configs[TrainConfig].max_steps))
    if moments is not None:
        own = [(item, item.detach().clone()) for item in trainer.model.parameters() if item.requires_grad]
        checkpoint.restore(moments, trainer)
        if weights.checkpoint is not moments:  # it also holds the weights that publication rounds
            for parameter, value in own:
                parameter.data.copy_(value)
    return trainer


_ONE_PROCESS = {
    "tp_size": 1, "pp_size": 1, "cp_size": 1, "ep_size": 1, "torch_compile": False, "publish": "full",
    "token_statistics_mib": 0.0,
}  # fmt: skip
"""Flags of the run that differ here: one process computes, and publishes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One trained trajectory, and its estimated part of the change of the held-out score."""

    record: str
    task: str
    step: int
    """The last step that trained it."""
    score: float
    advantage: float
    """The mean over its trained tokens, as that step trained them: whitened, old tokens decayed."""
    scorer: str | None
    tools: tuple[str, ...]
    min_version: int
    max_version: int
    effect: float
    """Score: positive if it moved the tasks as they changed. Of tasks that fell, this is the blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What ``blame`` found. ``effects`` are sorted, the largest first."""

    a: Evaluation
    b: Evaluation
    tasks: tuple[ChangedTask, ...]
    """The tasks whose change is explained."""
    measured: float
    """Σ weight · change of these tasks, where a task's weight is its share of the absolute change."""
    effects: tuple[Effect, ...]
    steps: tuple[int, ...]
    weights: tuple[int, ...]
    """The steps after which the weights were saved at which gradients were computed."""
    is_scaled: bool
    """Whether gradients were scaled by AdamW's moments."""
    missing: int
    """Trained trajectories whose training data are deleted."""

    @property
    def estimated(self) -> float:
        """Return the part of ``measured`` that the trajectories explain to first order."""
        return sum(item.effect for item in self.effects)


async def blame(configs: Configs, named_a: str, named_b: str, progress: Parts) -> Blame:
    """Return the effect of each trajectory that the run trained between evaluations A and B.

    ``configs`` has a BlameConfig too; flags of the trainer that are not given are those that it had at each
    step. Raises ConfigError if A is not before B, if no task changed as ``--changes`` says, or if no step
    lies between.
    """
    here = configs
    async with await open_existing(here[RunConfig]) as store:
        flags = here[BlameConfig]
        a, b = await find(store, named_a), await find(store, named_b)
        steps = await _steps_between(store, a, b)
        made = await stored_flags(store, steps)
        configs = _configs_of_run(made[steps[-1].id], here)
        require(
            not configs[CriticConfig].is_on,
            f"run {store.run_name!r} was trained with --critic {configs[CriticConfig].critic}: the advantages"
            " that its steps had are not stored",
            "blame a run without a critic",
        )
        tasks = await changed_tasks(store, configs, a, b, flags.changes)
        held_out = await held_out_data(store, configs, (a, b), tasks)
        own = configs[RunConfig].checkpoint_roots(configs[TrainConfig].fallback_output_dir)
        roots = own if here[RunConfig].output_dir else await store.settings.checkpoint_folders()
        available = await available_weights(store, configs, roots)
        plan = assign_weights(steps, available, flags.checkpoints)
        measuring = _Measuring(
            store=store,
            configs=configs,
            progress=progress,
            steps=steps,
            held_out=held_out,
            moments=[item.checkpoint for item in available if item.checkpoint and flags.adam_scale],
        )
        effects: dict[str, Effect] = {}
        missing = 0
        for weights, chosen in plan.items():
            for stored, part in groupby(chosen, lambda step: made[step.id]):
                alike = replace(measuring, configs=_configs_of_run(stored, here))
                found, lost = await alike.at(weights, [*part])
                gc.collect()  # the trainer, before the next one is loaded
                missing += lost
                for item in found:
                    before = effects.get(item.record)
                    more = 0.0 if before is None else before.effect
                    effects[item.record] = replace(item, effect=item.effect + more)
    if not effects:
        raise ConfigError(
            f"the training data of steps {steps[0].step} to {steps[-1].step} are deleted",
            hint="blame reads tokens and advantages; `agentrl db prune` deletes them",
        )
    return Blame(
        a=a,
        b=b,
        tasks=tuple(tasks),
        measured=sum(task.change**2 for task in tasks) / sum(abs(task.change) for task in tasks),
        effects=tuple(sorted(effects.values(), key=lambda item: (-item.effect, item.record))),
        steps=tuple(step.step for step in steps),
        weights=tuple(weights.step for weights in plan),
        is_scaled=bool(measuring.moments),
        missing=missing,
    )


def _configs_of_run(stored: RunSettings, here: Configs) -> Configs:
    """Return the flags of a trainer of the run, with those that are given here, for one process."""
    given = public_flags(here)
    output = given["output_dir"] or stored.values.get("output_dir")
    own = {name: given[name] for name in here.given & given.keys()}
    flags = own | {"output_dir": output} | _ONE_PROCESS
    return parent_configs(stored.values, stored.given, here).with_flags(flags)


async def _steps_between(store: Store, a: Evaluation, b: Evaluation) -> list[TrainStep]:
    """Return the committed steps after the version of A, up to that of B."""
    if a.step is None or b.step is None:
        item = a if a.step is None else b
        raise ConfigError(
            f"{item.id} evaluates a model folder, and no step of the run leads to it",
            hint="name evaluations of two versions of the run (--eval_version)",
        )
    if a.step >= b.step:
        raise ConfigError(
            f"{a.id} is of step {a.step}, and {b.id} of step {b.step}: no step lies between",
            hint="name the evaluation of the earlier version first",
        )
    steps = [item for item in await store.steps.find(after=a.step) if item.step <= (b.step or 0)]
    recorded = next((item.recorded for item in steps if item.recorded is not None), None)
    if recorded is not None:
        raise ConfigError(
            f"run {store.run_name!r} is a what-if: it has no training data of its own",
            hint=f"blame evaluations of {recorded.run}, whose data it trained again",
        )
    if not steps:
        raise ConfigError(
            f"run {store.run_name!r} has no committed step from {a.step + 1} to {b.step}",
            hint="name evaluations of versions that this run trained",
        )
    return steps


@dataclass(frozen=True, kw_only=True)
class _Measuring:
    """Measures how far the trajectories of steps moved the held-out tasks, at one set of weights a time."""

    store: Store
    configs: Configs
    progress: Parts
    steps: Sequence[TrainStep]
    """All steps between the evaluations."""
    held_out: tuple[Sequence[DBRecordData], Images]
    """The trajectories of the tasks, with advantages along which the tasks change as they did."""
    moments: Sequence[Checkpoint]
    """Checkpoints with AdamW's moments; empty if gradients are not scaled."""

    async def at(self, weights: Weights, steps: Sequence[TrainStep]) -> tuple[list[Effect], int]:
        """Return the effects of the trajectories of ``steps``, and how many have no training data left."""
        where, until = f"the weights of step {weights.step}", self.progress.until
        trainer = await until(f"loading {where}", self._load(weights))
        direction = await until(
            f"held-out tasks at {where}", asyncio.to_thread(likelihood_direction, trainer, *self.held_out)
        )
        if self.moments:
            direction = direction.scaled_by(trainer.optimizer)
        effects: list[Effect] = []
        missing = 0
        for step in steps:
            what = f"step {step.step}, {self.steps.index(step) + 1} of {len(self.steps)}, at {where}"
            found, lost = await until(what, self._of_step(step, trainer, direction))
            effects += found
            missing += lost
        return effects, missing

    async def _load(self, weights: Weights) -> PolicyTrainer:
        """Return the run's trainer with ``weights`` and the moments nearest to them."""
        nearest = min(self.moments, key=lambda item: abs(item.state.step - weights.step), default=None)
        folder = None if weights.checkpoint is None else weights.checkpoint.model
        copy = LocalCopy(await weights_dir(self.store, None) / "blame", is_exact=True)
        if folder is None and weights.version is not None:  # a delta, or weights of another machine
            folder = Path((await copy.hold(self.store, weights.version))[1])
        try:
            return await asyncio.to_thread(build_at, self.configs, folder, weights, nearest)
        finally:
            copy.release()

    async def _of_step(
        self, step: TrainStep, trainer: PolicyTrainer, direction: Direction
    ) -> tuple[list[Effect], int]:
        stored, _ = await self.store.training.fetch_readable(step.data)
        data = [stored[key] for key in step.data if key in stored]
        if not data:
            return [], len(step.data)
        versions = {span.version for item in data for span in item.spans}
        ages = await VersionSteps(self.store).ages(versions, step.step - 1)
        whitens = self.configs[TrainConfig].advantage_whitening == "batch"
        weighed = weigh(data, ages, freshness_of(self.configs), whitens=whitens)
        images = await images_of(self.store, data)
        found = await asyncio.to_thread(influences, trainer, weighed, direction, ages, images)
        origins = await self.store.records.origins([item.record for item in data])
        norm = float(step.metrics.get("grad_norm") or 0.0)
        # A step moved by its learning rate times the factor by which its gradient was clipped.
        clip = min(1.0, trainer.max_grad_norm / norm) if norm > 0 else 1.0
        scale = float(step.metrics.get("lr", 1.0)) * clip
        effects = [_effect(item, step, scale * found[item.id], origins) for item in weighed]
        return effects, len(step.data) - len(data)


def _effect(
    item: DBRecordData, step: TrainStep, effect: float, origins: Mapping[str, RecordOrigin]
) -> Effect:
    origin = origins.get(item.record)
    sizes = [(span.end - span.start, span) for span in item.spans]
    return Effect(
        record=item.record,
        task=item.task,
        step=step.step,
        score=item.score,
        advantage=sum(size * span.advantage for size, span in sizes) / (item.trainable_tokens or 1),
        scorer=None if origin is None else origin.scorer,
        tools=() if origin is None else origin.tools,
        min_version=item.min_version,
        max_version=item.max_version,
        effect=effect,
    )


KINDS: Final[dict[str, Callable[[Effect], Sequence[str]]]] = {
    "scorer": lambda item: (item.scorer or MISSING,),
    "tool": lambda item: item.tools or ("no tool",),
    "version": lambda item: (versions(item.min_version, item.max_version),),
    "task": lambda item: (item.task,),
}
"""Kind of group → the names of the groups of a trajectory. One that called two tools counts in both."""
LABELER: Final = "agentrl blame"
"""Who gives the labels of ``--label``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlamedGroup:
    """The trajectories with one scorer, tool, version or task."""

    name: str
    trajectories: int
    blamed: int
    """How many of them are among the blamed ones."""
    effect: Estimate
    """The sum of their effects, with a 95 % interval: bootstrap over tasks; of one task, over its members."""


def groups_of(blame: Blame, blamed: Sequence[Effect], limit: int) -> dict[str, list[BlamedGroup]]:
    """Return kind → its ``limit`` groups with the largest sums, the largest first."""
    chosen = {item.record for item in blamed}
    found: dict[str, list[BlamedGroup]] = {}
    for kind, names in KINDS.items():
        members: dict[str, list[Effect]] = defaultdict(list)
        for item in blame.effects:
            for name in names(item):
                members[name].append(item)
        largest = sorted(members, key=lambda name: -sum(item.effect for item in members[name]))[:limit]
        found[kind] = [
            BlamedGroup(
                name=name,
                trajectories=len(members[name]),
                blamed=sum(item.record in chosen for item in members[name]),
                effect=_sum(members[name]),
            )
            for name in largest
        ]
    return found


def _sum(items: Sequence[Effect]) -> Estimate:
    by_task: dict[str, float] = defaultdict(float)
    for item in items:
        by_task[item.task] += item.effect
    rows = list(by_task.values()) if len(by_task) > 1 else [item.effect for item in items]
    mean = estimates([rows])[0]
    assert mean is not None
    size = len(rows)
    return Estimate(value=mean.value * size, low=mean.low * size, high=mean.high * size)


def show(blame: Blame, blamed: Sequence[Effect], flags: BlameConfig, console: Console) -> None:
    """Print what changed, what it was computed from, the blamed trajectories and the groups."""
    a, b, tasks = blame.a, blame.b, blame.tasks
    before, after = (sum(getattr(task, name) for task in tasks) / len(tasks) for name in ("before", "after"))
    scaled = ", scaled by AdamW's moments" if blame.is_scaled else ", not scaled: no checkpoint is left"
    lines = [
        f"A             {a.id}, step {a.step}",
        f"B             {b.id}, step {b.step}",
        f"tasks         {len(tasks)} ({flags.changes}): mean score {before:.3f} → {after:.3f}",
        f"trajectories  {len(blame.effects):,} of steps {blame.steps[0]} to {blame.steps[-1]}"
        + (f"; {blame.missing:,} have no training data any more" if blame.missing else ""),
        f"gradients     at the weights of steps {', '.join(map(str, blame.weights))}{scaled}",
        f"change        {blame.measured:+.3f} measured, {blame.estimated:+.3f} by the trajectories together",
    ]
    rows = table_of(
        f"{len(blamed)} blamed of {len(blame.effects):,}; the first {min(len(blamed), flags.limit)}",
        blamed[: flags.limit],
        ("record", lambda item: item.record),
        ("scorer", lambda item: item.scorer or MISSING),
        ("tools", lambda item: excerpt(", ".join(item.tools) or MISSING, 30)),
        ("effect", lambda item: f"{item.effect:+.2e}"),
        ("score", lambda item: f"{item.score:g}"),
        ("advantage", lambda item: f"{item.advantage:+.2f}"),
        ("version", lambda item: versions(item.min_version, item.max_version)),
        ("step", lambda item: item.step),
        text=3,
    )
    groups = [
        table_of(
            f"by {kind}",
            members,
            (kind, lambda item: item.name),
            ("trajectories", lambda item: item.trajectories),
            ("blamed", lambda item: item.blamed),
            ("effect", lambda item: f"{item.effect.value:+.2e}"),
            ("95 % interval", lambda item: f"[{item.effect.low:+.2e}, {item.effect.high:+.2e}]"),
        )
        for kind, members in groups_of(blame, blamed, flags.limit).items()
    ]
    console.print(Group(*map(plain, lines), "", rows, *groups))


def to_json(blame: Blame, blamed: Sequence[Effect], flags: BlameConfig) -> dict[str, Any]:
    """Return everything as JSON; ``blamed`` is the number of first trajectories that are blamed."""
    return {
        "a": blame.a.id, "b": blame.b.id, "steps": blame.steps, "weights": blame.weights,
        "adam_scale": blame.is_scaled, "missing": blame.missing,
        "tasks": [dataclasses.asdict(task) | {"change": task.change} for task in blame.tasks],
        "measured": blame.measured, "estimated": blame.estimated, "blamed": len(blamed),
        "trajectories": [dataclasses.asdict(item) for item in blame.effects],
        "groups": {
            kind: [dataclasses.asdict(item) for item in members]
            for kind, members in groups_of(blame, blamed, flags.limit).items()
        },
    }  # fmt: skip


def write_files(blame: Blame, blamed: Sequence[Effect], flags: BlameConfig) -> None:
    """Write the ids to ``--out`` and the table to ``--csv``. Raises ConfigError for an unwritable file."""
    if flags.out is not None:
        with _opened("--out", flags.out) as file:
            file.writelines(f"{item.record}\n" for item in blamed)
    if flags.csv is not None:
        names = [item.name for item in dataclasses.fields(Effect)]
        with _opened("--csv", flags.csv) as file:
            rows = csv.writer(file)
            rows.writerow(names)
            for item in blame.effects:
                values = dataclasses.asdict(item) | {"tools": " ".join(item.tools)}
                rows.writerow([values[name] for name in names])


def _opened(flag: str, path: str) -> Any:
    try:
        return Path(path).open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be written: {error.strerror}", hint="give the path of a file"
        ) from error


async def put_labels(store: Store, blame: Blame, blamed: Sequence[Effect], label: str) -> None:
    """Label the blamed Records; the note holds their rank and effect."""
    for rank, item in enumerate(blamed, 1):
        change = f"{item.effect:+.2e} of the change from {blame.a.id} to {blame.b.id}"
        note = f"{rank} of {len(blame.effects)}: {change}"
        await store.labels.put(item.record, by=LABELER, label=label, note=note)
