"""What a rank does to save and publish: copy its share of a step, and write it while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from agentrl.documents.run import LiveKind, LiveWeights
from agentrl.errors import PublishError
from agentrl.train.optimizer import optimizer_state, write_optimizer
from agentrl.train.published_share import PublishedShare
from agentrl.train.step import PolicyTrainer
from agentrl.weights.delta import SUFFIX, encode
from agentrl.weights.folder import ADAPTER_WEIGHTS
from agentrl.weights.live import LiveHolder
from agentrl.weights.model_folder import checksums, complete_folder
from agentrl.weights.sharded_writer import Written, join, write_beside, write_share
from agentrl.weights.snapshot import FILE_BYTES, FilePlan, Snapshot, Snapshots, WeightSource

T = TypeVar("T")
R = TypeVar("R")
_ENCODERS = 2
"""Threads that compare tensors of a rank: training needs the other cores."""


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
        return self._thread.submit(self._gather, self._thread.submit(write), then)

    def close(self) -> None:
        """Wait for the writes; the process groups may be destroyed then."""
        self._thread.shutdown()

    def _gather(self, own: Future[T], then: Callable[[list[T]], R]) -> R | None:
        if self.group is None:
            return then([own.result()])
        rank, error = dist.get_rank(), own.exception()
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
                use_shared_memory=False,
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
        """Write ``model``, unless it is linked from a version, and ``optimizer`` of a checkpoint."""
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
