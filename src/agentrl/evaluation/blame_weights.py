"""Find the stored weights of a run, assign them to its steps, and build the run's trainer with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.load import Configs
from agentrl.config.schema import AdapterConfig, ModelConfig, RunConfig, TrainConfig
from agentrl.documents.checkpoint import Checkpoint
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.documents.training import TrainStep
from agentrl.evaluation.policy import of_published
from agentrl.train import checkpoint
from agentrl.train.build import build_trainer
from agentrl.train.step import PolicyTrainer
from agentrl.weights.folder import base_folder
from agentrl.weights.local_copy import LocalCopy

if TYPE_CHECKING:
    from agentrl.store.client import Store


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Stored weights after ``step`` optimizer steps; those of the base model if nothing is named."""

    step: int
    checkpoint: Checkpoint | None = None
    version: PolicyVersion | None = None


async def available_weights(store: Store, configs: Configs) -> list[Weights]:
    """Return the stored weights: base model, checkpoints (of parents too), versions of what is trained."""
    found = {0: Weights(0)}
    encodings = {"adapter"} if configs[AdapterConfig].lora_rank > 0 else {"full", "delta"}
    for version in await store.policy_versions.all():
        is_there = version.status is VersionStatus.PUBLISHED and of_published(version).is_stored
        if is_there and version.step > 0 and version.encoding in encodings:
            found[version.step] = Weights(version.step, version=version)
    steps = await store.steps.find(status=None)
    run = configs[RunConfig]
    for root in run.checkpoint_roots(configs[TrainConfig].fallback_output_dir):
        for item in checkpoint.usable(root, steps, run_name=run.run_name):
            found[item.state.step] = Weights(item.state.step, checkpoint=item)
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


async def local_folder(store: Store, weights: Weights, copy: LocalCopy) -> Path | None:
    """Return the folder of ``weights``, copied to this machine where they are a delta or remote."""
    if weights.checkpoint is not None:
        return weights.checkpoint.model
    return Path((await copy.hold(store, weights.version))[1]) if weights.version is not None else None


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
