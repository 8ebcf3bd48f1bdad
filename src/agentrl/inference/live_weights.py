"""Bring a version from the trainer's memory to one engine, without a disk in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from agentrl.documents.run import LiveWeights, PolicyVersion
from agentrl.errors import EngineError
from agentrl.inference.control import EngineControl
from agentrl.processes import has_ended, is_observable

if TYPE_CHECKING:
    from agentrl.weights.memory_file import MemoryFile, StoredTensor
    from agentrl.weights.weight_group import GroupBackend, WeightRequests

Call = Callable[[], Awaitable[None]]


class PartlyLoadedError(EngineError):
    """An update failed midway, and the engine may hold a mixture of two versions."""


class LiveLoader:
    """Loads live versions into one engine, which is paused meanwhile."""

    def __init__(self, client: EngineControl) -> None:
        self._client = client
        self._requests: WeightRequests | None = None

    async def load(self, version: PolicyVersion) -> None:
        """Load ``version``.

        Raises PublishError if the trainer does not give it, and EngineError if the engine refuses it; the
        engine then keeps its weights. SGLang changes weights as they arrive: PartlyLoadedError.
        """
        live = version.live
        assert live is not None
        info = await self._client.server_info()
        is_local = info.get("engine") == "local"
        if live.kind == "distributed":
            calls = await self._calls_over_group(version.id, live, str(info.get("device")))
        elif is_local:
            calls = [partial(self._client.load_memory, str(live.file), version.id)]
        else:
            calls = await self._calls_with_buckets(version.id, live, int(info.get("tp_size") or 1))
        await self._client.begin_update()
        try:
            for call in calls:
                await call()
            await self._client.end_update()
        except EngineError as error:
            self._requests = None  # the next version gets a group of its own
            if is_local:
                raise
            with contextlib.suppress(EngineError):
                await self._client.end_update()
            raise PartlyLoadedError(error.message) from error

    async def _calls_over_group(self, version: int, live: LiveWeights, device: str) -> list[Call]:
        """Ask the trainer for ``version`` and join its group; return the calls that receive the buckets."""
        from agentrl.weights.weight_group import WeightRequests

        host = "127.0.0.1" if is_observable(live.process) else live.host
        port = int(live.port or 0)
        requests = self._requests
        if requests is None or requests.address != (host, port):
            backend: GroupBackend = "nccl" if live.nccl and device.startswith("cuda") else "gloo"
            requests = await asyncio.to_thread(WeightRequests, host, port, backend)
            self._requests = requests
        try:
            transfer = await asyncio.to_thread(requests.ask, version)
            if transfer.is_new:
                await self._client.join_group(transfer.group, host, port, requests.backend)
        except BaseException:
            self._requests = None
            raise
        return [partial(self._client.receive, transfer.group, bucket, version) for bucket in transfer.buckets]

    async def _calls_with_buckets(self, version: int, live: LiveWeights, ranks: int) -> list[Call]:
        from agentrl.weights.memory_file import open_memory_file
        from agentrl.weights.weight_group import BUCKET_BYTES

        weights = await asyncio.to_thread(open_memory_file, str(live.file))
        return [
            partial(self._load_bucket, weights, bucket, ranks, version)
            for bucket in weights.buckets(BUCKET_BYTES)
        ]

    async def _load_bucket(
        self, weights: MemoryFile, bucket: tuple[StoredTensor, ...], ranks: int, version: int
    ) -> None:
        from agentrl.weights.pickled_bucket import pickled_bucket

        shared, pickled = await asyncio.to_thread(pickled_bucket, weights, bucket)
        await self._client.load_pickled(pickled, ranks, version, len(shared))


def is_reachable(live: LiveWeights) -> bool:
    """Return whether this process may load ``live``; its trainer is not asked."""
    if live.kind == "tensor" and not is_observable(live.process):
        return False
    return not has_ended(live.process)
