"""Rank 0 decides what is computed: it broadcasts each command, and every rank's PolicyTrainer executes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from agentrl.distributed.gather import (
    GatheredAdapter,
    GatheredModel,
    Inventory,
    gather_adapter,
    take_inventory,
)
from agentrl.distributed.world import Command, World
from agentrl.documents.images import Image
from agentrl.documents.training import DBRecordData
from agentrl.model.load import Policy
from agentrl.train.step import PolicyTrainer, StepResult
from agentrl.weights.model_folder import SavableModel


@dataclass(frozen=True)
class Controller:
    """Runs the PolicyTrainers of all ranks from rank 0. A single process broadcasts to nobody."""

    trainer: PolicyTrainer
    """This rank's."""
    world: World
    inventory: Inventory

    @property
    def policy(self) -> Policy:
        """The model, of which this rank holds a part, and its tokenizer's folder."""
        return self.trainer.policy

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's part of the optimizer."""
        return self.trainer.optimizer

    @property
    def scheduler(self) -> LRScheduler:
        """The learning-rate schedule, equal on all ranks."""
        return self.trainer.scheduler

    def train(
        self,
        data: Sequence[DBRecordData],
        ages: Mapping[int, int] | None = None,
        images: Mapping[str, Image] | None = None,
    ) -> StepResult:
        """Run ``PolicyTrainer.train`` on all ranks."""
        shown = () if images is None else (images,)
        self._broadcast("train", tuple(data), ages, *shown)
        return self.trainer.train(data, ages, *shown)

    def save_optimizer(self, folder: Path) -> None:
        """Write the optimizer's state and the weights that publication rounds; each rank writes its part."""
        self._broadcast("save_optimizer", folder)
        self.trainer.save_optimizer(folder)

    def published(self) -> SavableModel:
        """Return the whole weights, as engines load them; they are gathered while they are written."""
        if self._holds_all:
            return self.policy.published
        return GatheredModel(self.inventory, partial(self._broadcast, "send_weights"))

    def kept(self) -> SavableModel:
        """Return what a checkpoint holds of the model: all weights, or the adapter alone."""
        if self.policy.adapter is None:
            return self.published()
        if self._holds_all:
            return self.policy.kept
        return GatheredAdapter(self.policy.adapter, partial(self._broadcast, "send_adapter"))

    def end(self) -> None:
        """Let the other ranks return from ``follow``."""
        self._broadcast("end")

    @property
    def _holds_all(self) -> bool:
        """Whether this process has the whole model; a pipeline stage has its layers alone."""
        return self.world.size == 1 and not self.trainer.model.is_sharded

    def _broadcast(self, name: str, *arguments: Any) -> None:
        self.world.use_device()
        self.world.broadcast(Command(name, arguments))


def lead(world: World, build: Callable[..., PolicyTrainer], *arguments: Any) -> Controller:
    """Call ``build(*arguments)`` on all ranks, and return the controller; for rank 0."""
    world.use_device()
    world.broadcast(Command("build", arguments))
    trainer = build(*arguments)
    return Controller(trainer, world, take_inventory(trainer.policy))


def follow(world: World, build: Callable[..., PolicyTrainer]) -> None:
    """Execute rank 0's commands until ``end``; for every other rank. The first command is ``build``."""
    world.use_device()
    trainer = build(*world.receive().arguments)
    inventory = take_inventory(trainer.policy)
    actions: dict[str, Callable[..., object]] = {
        "train": trainer.train,
        "save_optimizer": trainer.save_optimizer,
        "send_weights": inventory.send,
    }
    if trainer.policy.adapter is not None:
        actions["send_adapter"] = partial(gather_adapter, trainer.policy.adapter)
    while (command := world.receive()).name != "end":
        actions[command.name](*command.arguments)
