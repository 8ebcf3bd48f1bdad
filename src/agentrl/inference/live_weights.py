"""Bring a version from the trainer's memory to one engine, without a disk in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING

from agentrl.documents.run import LiveShare, LiveWeights, PolicyVersion
from agentrl.errors import EngineError, PublishError
from agentrl.inference.control import EngineControl
from agentrl.processes import has_ended, is_observable

if TYPE_CHECKING:
    from agentrl.weights.live import GroupBackend, WeightRequests


class PartlyLoadedError(EngineError):
    """An update failed midway, and the engine may hold a mixture of two versions."""


class LiveLoader:
    """Loads live versions into one engine, which is paused meanwhile."""

    def __init__(self, client: EngineControl) -> None:
        self._client = client
        self._requests: dict[tuple[str, int], WeightRequests] = {}
        """By the address of a rank of the trainer."""

    async def load(self, version: PolicyVersion) -> None:
        """Load ``version``.

        Raises PublishError if the trainer does not give it, and EngineError if the engine refuses it; the
        engine then keeps its weights. SGLang changes weights as they arrive: PartlyLoadedError.
        """
        live = version.live
        assert live is not None
        info = await self._client.server_info()
        is_local, is_changed = info.get("engine") == "local", False
        await self._client.begin_update()
        try:
            for share in live.shares:
                if live.kind == "distributed":
                    nccl = live.nccl and str(info.get("device")).startswith("cuda")
                    calls = self._receive(version.id, share, "nccl" if nccl else "gloo")
                elif is_local:
                    calls = self._load_memory(version.id, share)
                else:
                    calls = self._load_pickled(version.id, share, int(info.get("tp_size") or 1))
                async for call in calls:
                    is_changed = not is_local
                    await call
            await self._client.end_update()
        except (EngineError, PublishError) as error:
            self._requests.clear()  # the next version gets groups of its own
            if not is_local:
                with contextlib.suppress(EngineError):
                    await self._client.end_update()
            if is_changed:
                raise PartlyLoadedError(error.message) from error
            raise

    async def _receive(
        self, version: int, share: LiveShare, backend: GroupBackend
    ) -> AsyncIterator[Awaitable[None]]:
        """Ask a rank for its share and join its group; yield the calls that receive the buckets."""
        from agentrl.weights.live import WeightRequests

        host = "127.0.0.1" if is_observable(share.process) else share.host
        address = (host, int(share.port or 0))
        if (requests := self._requests.get(address)) is None:
            requests = await asyncio.to_thread(WeightRequests, *address, backend)
            self._requests = {**self._requests, address: requests}
        transfer = await asyncio.to_thread(requests.ask, share.name)
        if transfer.is_new:
            await self._client.join_group(transfer.group, *address, backend)
        for bucket in transfer.buckets:
            yield self._client.receive(transfer.group, bucket, version)

    async def _load_memory(self, version: int, share: LiveShare) -> AsyncIterator[Awaitable[None]]:
        yield self._client.load_memory(str(share.file), share.name, version)

    async def _load_pickled(
        self, version: int, share: LiveShare, ranks: int
    ) -> AsyncIterator[Awaitable[None]]:
        from agentrl.weights.live import BUCKET_BYTES, open_memory_file

        weights = await asyncio.to_thread(open_memory_file, str(share.file), share.name)
        for bucket in weights.buckets(BUCKET_BYTES):
            shared, pickled = await asyncio.to_thread(weights.pickled, bucket)
            yield self._client.load_pickled(pickled, ranks, version, len(shared))


def is_reachable(live: LiveWeights) -> bool:
    """Return whether this process may load ``live``; its trainer is not asked."""
    return not any(
        has_ended(share.process) or (live.kind == "tensor" and not is_observable(share.process))
        for share in live.shares
    )
