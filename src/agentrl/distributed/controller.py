"""A PolicyTrainer on every process: rank 0's passes each call on, the others' carry out what they hear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from agentrl.distributed.state import (
    GatheredAdapter,
    Inventory,
    StreamedModel,
    gather_adapter,
    give_parts,
    take_inventory,
)
from agentrl.distributed.world import World
from agentrl.documents.training import DBRecordData
from agentrl.model.load import Policy
from agentrl.train.compute import PolicyTrainer, StepResult
from agentrl.weights.model_folder import SavableModel


@dataclass(frozen=True)
class Leader:
    """Rank 0's side: used like a PolicyTrainer that runs alone."""

    computer: PolicyTrainer
    team: World
    inventory: Inventory

    @property
    def policy(self) -> Policy:
        """The model, of which this process holds a part, and the folder of its tokenizer."""
        return self.computer.policy

    @property
    def optimizer(self) -> Any:
        """This process's part of the optimizer."""
        return self.computer.optimizer

    @property
    def scheduler(self) -> LRScheduler:
        """The learning-rate schedule, equal on all."""
        return self.computer.scheduler

    def train(self, data: Sequence[DBRecordData], ages: Mapping[int, int] | None = None) -> StepResult:
        """``PolicyTrainer.train`` on all processes."""
        self.team.use_device()
        self.team.tell("train", tuple(data), ages)
        return self.computer.train(data, ages)

    def published(self) -> SavableModel:
        """The whole weights, gathered from all processes while they are written."""
        return StreamedModel(self.inventory, partial(self._begin, "give"))

    def kept(self) -> SavableModel:
        """What a checkpoint holds of the model: all of it, or the adapter alone."""
        if self.policy.adapter is None:
            return self.published()
        return GatheredAdapter(self.policy.adapter, partial(self._begin, "give_adapter"))

    def save_optimizer(self, folder: Path) -> None:
        """Write the optimizer's state, each process its shards."""
        self.team.use_device()
        self.team.tell("save_optimizer", folder)
        self.computer.save_optimizer(folder)

    def _begin(self, order: str) -> None:
        self.team.use_device()
        self.team.tell(order)


def lead(computer: PolicyTrainer, team: World) -> Leader:
    """On rank 0, while the others begin to ``follow``."""
    team.use_device()
    return Leader(computer, team, take_inventory(computer.policy))


def follow(computer: PolicyTrainer, team: World) -> None:
    """On every process but rank 0: carry out orders until the last one."""
    team.use_device()
    inventory = take_inventory(computer.policy)
    while (order := team.hear()).name != "end":
        if order.name == "train":
            data, ages = order.arguments
            computer.train(data, ages)
        elif order.name == "give":
            give_parts(inventory)
        elif order.name == "give_adapter" and computer.policy.adapter is not None:
            gather_adapter(computer.policy.adapter)
        elif order.name == "save_optimizer":
            (folder,) = order.arguments
            computer.save_optimizer(folder)
        else:
            raise ValueError(f"order {order.name!r}")
