"""Rank 0 decides what is computed and written; every rank executes its commands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from agentrl.base.device_lease import return_freed_memory
from agentrl.distributed.load_shards import ShardRows, read_rows
from agentrl.distributed.mesh import World
from agentrl.documents.images import Image
from agentrl.documents.run import LiveKind, LiveWeights
from agentrl.documents.training import DBRecordData
from agentrl.errors import ModelError, PublishError
from agentrl.model.load import Policy
from agentrl.train.optimizer import optimizer_state, write_optimizer
from agentrl.train.step import PolicyTrainer, StepResult
from agentrl.weights.delta import SUFFIX, Rounding, encode
from agentrl.weights.folder import ADAPTER_WEIGHTS, checksums, complete_folder
from agentrl.weights.live import LiveHolder
from agentrl.weights.snapshot import (
    FILE_BYTES,
    FilePlan,
    Snapshot,
    Snapshots,
    WeightSource,
    Written,
    join,
    write_beside,
    write_share,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
_ENCODERS = 2
"""Threads that compare tensors of a rank: training needs the other cores."""
_ROWS = 4
"""Rows of this rank's part of a weight that are compared with the base.

They are few enough that one thread computes with them: starting more threads for each weight takes longer.
"""


@dataclass
class PublishedShare:
    """Compares the trained weights, and what rounding leaves of them, with the base model.

    The whole base would have to be held or read again for each version, so rows of each weight stand for it.
    An adapter's change needs no base: it is summed over all merged weights.
    """

    policy: Policy

    @cached_property
    def _base(self) -> dict[str, ShardRows]:
        """The base model's rows, by parameter; its files are read once."""
        model, base = self.policy.model, self.policy.base
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        try:
            return read_rows(model, base, trained, _ROWS)
        except ModelError as error:
            logger.warning("published_update_share is not reported: %s", error.message)
            return {}

    @torch.no_grad()
    def measure(self) -> float | None:
        """Return the share of the present weights; None if nothing has changed, or the adapter travels alone.

        Every rank calls it.
        """
        policy, own = self.policy, self.policy.own_dtype
        if policy.adapter is not None:
            return None if policy.publishes_adapter else policy.adapter.rounding.take_share()
        if own is None or torch.promote_types(policy.model.dtype, own) == own:
            return 1.0
        rounding = Rounding()
        weights = dict(policy.model.named_parameters())
        for part in policy.published.parts():
            if part.name in self._base:
                rows = self._base[part.name]
                weight = weights[part.name]
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                trained = rows.of(local).float()
                base = rows.values.to(trained)
                written = trained.to(part.like.dtype).float()
                rounding.add(trained - base, written - base, local.numel() / trained.numel())
        return rounding.take_share()


def to_host(trainer: PolicyTrainer) -> None:
    """Move weights and moments to pinned memory, and give the device's memory back; between two steps only.

    On a CPU nothing moves: the memory that the step has freed is given back.
    """
    to_device(trainer, torch.device("cpu"))
    if torch.cuda.is_available():
        # Wait: copies to pinned memory are still under way when the call returns.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return_freed_memory()


def to_device(trainer: PolicyTrainer, device: torch.device) -> None:
    """Move weights and moments to ``device``; parameters stay the same objects, sharded or not.

    ``Module._apply`` is what ``Module.to`` calls. FSDP2 frees gathered weights there, and keeps its
    references to the shards right.
    """

    def moved(tensor: Tensor) -> Tensor:
        if tensor.device.type == device.type:
            return tensor
        to_host = device.type == "cpu"
        copy = torch.empty_like(tensor, device=device, pin_memory=to_host)
        return copy.copy_(tensor, non_blocking=True)

    reference, critic = trainer.frozen.reference, trainer.critic
    of_critic = () if critic is None else (critic.head, critic.trunk)
    for model in (trainer.model, None if reference is None else reference.model, *of_critic):
        if model is not None:
            model._apply(moved)
    if trainer.memory.optimizer_offload:  # the moments never stay on the device
        return
    for optimizer in (trainer.optimizer, *(() if critic is None else (critic.optimizer,))):
        for state in optimizer.state.values():
            for name, value in state.items():
                # Leave step counters: AdamW reads them on the host, unless it is fused.
                if isinstance(value, Tensor) and value.dim():
                    state[name] = moved(value)


class Lane:
    """Works off writes in order, in one thread; the ranks' threads meet in a process group of their own.

    Every rank submits the same writes in the same order.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        """Over gloo; None for a single process. No other thread may use it."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, write: Callable[[], T], then: Callable[[list[T]], R]) -> Future[Any]:
        """Call ``write`` on every rank, and ``then`` on rank 0 with what the ranks returned, by rank.

        On rank 0 the future has the result of ``then``, or the error of the first rank on which ``write``
        failed. On other ranks it has None.
        """
        # Queue two calls in the one thread: ``_gather`` has to run also where ``write`` raises.
        return self._thread.submit(self._gather, self._thread.submit(write), then)

    def close(self) -> None:
        """Wait for the writes; the process groups may be destroyed then."""
        self._thread.shutdown()

    def _gather(self, own: Future[T], then: Callable[[list[T]], R]) -> R | None:
        if self.group is None:
            return then([own.result()])
        rank, error = dist.get_rank(), own.exception()
        # Send a failure too: a rank that raised here would leave the others waiting in the gather.
        sent = (None if error else own.result(), error and _portable(error, rank))
        results: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(sent, results, group=self.group)
        if results is None:
            return None
        for _, failure in results:
            if failure is not None:
                raise failure
        return then([result for result, _ in results])


def _portable(error: BaseException, rank: int) -> Exception:
    """Return the error as rank 0 raises it; any other exception might not survive pickling."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    if isinstance(error, PublishError):
        return PublishError(error.message, hint=error.hint)
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")


class RankWriter:
    """Copies and writes one rank's share. Every rank calls the same methods in the same order.

    A method returns when the share is copied; training may go on then.
    """

    def __init__(
        self, trainer: PolicyTrainer, versions: Lane, checkpoints: Lane, limit: int = FILE_BYTES
    ) -> None:
        self._trainer = trainer
        self._versions, self._checkpoints = versions, checkpoints
        policy = trainer.policy
        self.model = (
            _adapter_alone(policy.served) if policy.publishes_adapter else Snapshots.of(policy.served, limit)
        )
        """Of what engines load."""
        self.share: float | None = None
        """Share of the change by training that the newest copy of ``model`` has; None if unknown."""
        self._published_share = PublishedShare(policy)
        self._adapter = None if policy.adapter is None else _adapter_alone(policy.adapter)
        self._held: dict[int, Snapshot] = {}
        """By step: those that are being written, and the newest one, from which the next may differ."""
        self._reads: dict[int, list[Future[Any]]] = {}
        self._holder: LiveHolder | None = None
        on_gpu = policy.model.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                # Share with no process: a thread of this one writes.
                use_shared_memory=False,
                # Copy before returning: the next step changes the tensors.
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the weights of a checkpoint: the model's, or the adapter's alone."""
        return (self._adapter or self.model).bytes

    @cached_property
    def _configuration(self) -> dict[str, bytes]:
        if self.model.rank > 0:  # transformers writes them on rank 0 alone
            return {}
        return self._trainer.policy.served.configuration()

    def write_version(self, step: int, folder: Path, base: int | None = None) -> Future[Written]:
        """Write what engines load of ``step`` into ``folder``: whole, or what differs from step ``base``.

        ``base`` is a step that was written by this method since the start, and published.
        """
        # Release first: the next copy then takes that memory and allocates none.
        self._release(keep={step, base})
        snapshot = self._take(step)
        if base is None:
            write = partial(write_share, folder, snapshot)
            complete = partial(self._complete, folder, self._configuration, is_version=True)
            written = self._versions.submit(write, complete)
        else:
            encode_share = partial(_encode, folder, self.model.rank, self._held[base], snapshot)
            written = self._versions.submit(encode_share, join)
            self._reads[base].append(written)
        self._reads[step].append(written)
        return written

    def hold_version(self, step: int, kind: LiveKind) -> Future[LiveWeights]:
        """Hold what engines load of ``step`` in memory, for engines that take it without a disk."""
        self._release(keep={step})
        snapshot = self._take(step)
        if self._holder is None:
            self._holder = LiveHolder(kind, self._trainer.policy.model.device)
        held = self._versions.submit(partial(self._holder.hold, snapshot.tensors), self._holder.join)
        self._reads[step].append(held)
        return held

    def write_checkpoint(self, step: int, folder: Path, writes_model: bool) -> list[Future[Any]]:
        """Write ``model``, unless a version is linked, ``optimizer`` and ``critic`` of a checkpoint."""
        lane, policy, writes = self._checkpoints, self._trainer.policy, []
        if writes_model:
            adapter = self._adapter
            snapshot = self._take(step) if adapter is None else adapter.take()
            content = self._configuration if policy.adapter is None else policy.adapter.configuration()
            write = partial(write_share, folder / "model", snapshot)
            writes.append(lane.submit(write, partial(self._complete, folder / "model", content)))
            if adapter is None:
                self._reads[step].append(writes[-1])
        state = optimizer_state(policy.model, self._trainer.optimizer, policy.rounded_weights())
        staged: Any = self._stager.stage(state)
        writes.append(lane.submit(partial(write_optimizer, folder / "optimizer", staged, lane.group), len))
        if (critic := self._trainer.critic) is not None:
            state = optimizer_state(critic.module, critic.optimizer, critic.trained_weights())
            staged = self._stager.stage(state)
            writes.append(lane.submit(partial(write_optimizer, folder / "critic", staged, lane.group), len))
        return writes

    def close(self) -> None:
        """Wait for what is being written."""
        for lane in (self._versions, self._checkpoints):
            lane.close()
        if self._holder is not None:
            self._holder.close()

    def _take(self, step: int) -> Snapshot:
        if step not in self._held:
            self._held[step], self._reads[step] = self.model.take(), []
            self.share = self._published_share.measure()
        return self._held[step]

    def _release(self, keep: Collection[int | None]) -> None:
        """Release the snapshots of other steps for later ones, unless they are still being written."""
        for step in self._held.keys() - keep:
            if all(write.done() for write in self._reads[step]):
                self.model.release(self._held.pop(step))

    def _complete(
        self,
        folder: Path,
        configuration: dict[str, bytes],
        shares: list[Written],
        *,
        is_version: bool = False,
    ) -> Written:
        """Add on rank 0 what no share has: index, configuration and the tokenizer's files."""
        policy, whole = self._trainer.policy, join(shares)
        write_beside(folder, whole, configuration)
        if not (policy.publishes_adapter and is_version):  # the rest is in the folder of its base
            complete_folder(policy.base, folder, policy.chat_template)
        return Written(checksums(folder, whole.files), whole.tensors, whole.places)


def _adapter_alone(source: WeightSource) -> Snapshots:
    """Return the snapshots of an adapter, which rank 0 writes into one file."""
    parts = list(source.parts())
    size = sum(part.bytes for part in parts)
    plan = [FilePlan(ADAPTER_WEIGHTS, 0, (tuple(part.name for part in parts),), size)]
    return Snapshots(source, plan, dist.get_rank() if dist.is_initialized() else 0)


def _encode(folder: Path, rank: int, base: Snapshot, snapshot: Snapshot) -> Written:
    if not snapshot.tensors:
        return Written()
    encoded = encode(base.tensors, snapshot.tensors, folder / f"rank-{rank:05d}{SUFFIX}", _ENCODERS)
    return Written((encoded.file,), encoded.tensors)


@dataclass(frozen=True)
class Controller:
    """Runs the PolicyTrainers of all ranks from rank 0. A single process broadcasts to nobody."""

    trainer: PolicyTrainer
    """This rank's."""
    policy: Policy
    """The trainer's: the model, of which this rank holds a part, and its tokenizer's folder."""
    world: World
    writer: RankWriter
    """This rank's."""

    def train(
        self, data: Sequence[DBRecordData], ages: Mapping[int, int] | None, images: Mapping[str, Image]
    ) -> StepResult:
        """Run ``PolicyTrainer.train`` on all ranks."""
        self._broadcast("train", tuple(data), ages, images)
        return self.trainer.train(data, ages, images)

    def compute(self, name: str, *arguments: Any) -> Any:
        """Call a method of each rank's trainer, one of ``follow``'s ``methods``; return rank 0's result."""
        self._broadcast(name, *arguments)
        return getattr(self.trainer, name)(*arguments)

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
        # Set it at each call: CUDA's current device is a thread's, and any worker thread may call this.
        self.world.use_device()
        self.world.broadcast(name, *arguments)


def lead(world: World, build: Callable[..., PolicyTrainer], *arguments: Any) -> Controller:
    """Call ``build(*arguments)`` on all ranks, and return the controller; for rank 0."""
    world.use_device()
    world.broadcast("build", *arguments)
    trainer = build(*arguments)
    return Controller(trainer, trainer.policy, world, _writer(trainer, world))


def follow(world: World, build: Callable[..., PolicyTrainer], methods: Sequence[str] = ()) -> None:
    """Execute rank 0's commands until ``end``; for every other rank. Before ``build`` comes no other.

    ``methods`` are those of the trainer that ``Controller.compute`` may call.
    """
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
        **{method: getattr(trainer, method) for method in methods},
    }
    name, arguments = world.receive()
    while name != "end":
        actions[name](*arguments)
        name, arguments = world.receive()
    writer.close()


def _writer(trainer: PolicyTrainer, world: World) -> RankWriter:
    versions, checkpoints = world.writers
    return RankWriter(trainer, Lane("versions", versions), Lane("checkpoints", checkpoints))
