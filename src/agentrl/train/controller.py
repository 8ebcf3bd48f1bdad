"""Rank 0 decides what is computed and written; every rank executes its commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.distributed.world import World
from agentrl.documents.images import Image
from agentrl.documents.run import LiveKind, LiveWeights
from agentrl.documents.training import DBRecordData
from agentrl.model.load import Policy
from agentrl.train.background import Lane, RankWriter
from agentrl.train.offload import to_device, to_host
from agentrl.train.step import PolicyTrainer, StepResult
from agentrl.weights.sharded_writer import Written


@dataclass(frozen=True)
class Controller:
    """Runs the PolicyTrainers of all ranks from rank 0. A single process broadcasts to nobody."""

    trainer: PolicyTrainer
    """This rank's."""
    world: World
    writer: RankWriter
    """This rank's."""

    @property
    def policy(self) -> Policy:
        """The model, of which this rank holds a part, and its tokenizer's folder."""
        return self.trainer.policy

    def train(
        self, data: Sequence[DBRecordData], ages: Mapping[int, int] | None, images: Mapping[str, Image]
    ) -> StepResult:
        """Run ``PolicyTrainer.train`` on all ranks."""
        self._broadcast("train", tuple(data), ages, images)
        return self.trainer.train(data, ages, images)

    def to_host(self) -> None:
        """Move weights and moments to the host's memory on all ranks."""
        self._broadcast("to_host")
        to_host(self.trainer)

    def to_device(self) -> None:
        """Move weights and moments to the device on all ranks."""
        self._broadcast("to_device")
        to_device(self.trainer, self.world.device)

    def write_version(self, step: int, folder: Path, base: int | None = None) -> Future[Written]:
        """Run ``RankWriter.write_version`` on all ranks; the future has what all of them wrote."""
        self._broadcast("write_version", step, folder, base)
        return self.writer.write_version(step, folder, base)

    def hold_version(self, step: int, kind: LiveKind) -> Future[LiveWeights]:
        """Run ``RankWriter.hold_version`` on all ranks; the future has what all of them hold."""
        self._broadcast("hold_version", step, kind)
        return self.writer.hold_version(step, kind)

    def write_checkpoint(self, step: int, folder: Path, writes_model: bool) -> list[Future[Any]]:
        """Run ``RankWriter.write_checkpoint`` on all ranks."""
        self._broadcast("write_checkpoint", step, folder, writes_model)
        return self.writer.write_checkpoint(step, folder, writes_model)

    def end(self) -> None:
        """Wait for what is being written, and let the other ranks return from ``follow``."""
        self._broadcast("end")
        self.writer.close()

    def _broadcast(self, name: str, *arguments: Any) -> None:
        self.world.use_device()
        self.world.broadcast(name, *arguments)


def lead(world: World, build: Callable[..., PolicyTrainer], *arguments: Any) -> Controller:
    """Call ``build(*arguments)`` on all ranks, and return the controller; for rank 0."""
    world.use_device()
    world.broadcast("build", *arguments)
    trainer = build(*arguments)
    return Controller(trainer, world, _writer(trainer, world))


def follow(world: World, build: Callable[..., PolicyTrainer]) -> None:
    """Execute rank 0's commands until ``end``; for every other rank. Before ``build`` comes no other."""
    world.use_device()
    name, arguments = world.receive()
    if name == "end":
        return
    trainer = build(*arguments)
    writer = _writer(trainer, world)
    actions: dict[str, Callable[..., object]] = {
        "train": trainer.train,
        "to_host": partial(to_host, trainer),
        "to_device": partial(to_device, trainer, world.device),
        "write_version": writer.write_version,
        "hold_version": writer.hold_version,
        "write_checkpoint": writer.write_checkpoint,
    }
    name, arguments = world.receive()
    while name != "end":
        actions[name](*arguments)
        name, arguments = world.receive()
    writer.close()


def _writer(trainer: PolicyTrainer, world: World) -> RankWriter:
    versions, checkpoints = world.writers
    return RankWriter(trainer, Lane("versions", versions), Lane("checkpoints", checkpoints))
