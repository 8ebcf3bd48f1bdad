"""The trainer's turns on a device that it has together with engines (``--colocate``)."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from agentrl.device_lease import DeviceLease
from agentrl.train.controller import Controller

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class DeviceTurns:
    """Holds the device from a step's data to the snapshot of its weights; always, without a lease.

    The trainer is built in its first turn.
    """

    lease: DeviceLease | None
    controller: Controller
    is_locked: bool = True
    is_loaded: bool = True
    seconds: float = 0.0
    """Time since the end of the last turn for moving weights and moments, and for the engine to give way."""

    async def lock(self) -> None:
        """Wait for the engine to give the device. It may be cancelled."""
        if self.lease is not None and not self.is_locked:
            began = time.perf_counter()
            await self.lease.acquire(urgent=True)
            self.is_locked = True
            self.seconds += time.perf_counter() - began

    async def begin(self) -> None:
        """Begin a turn, if this is none: weights and moments are on the device then."""
        await self.lock()
        if not self.is_loaded:
            began = time.perf_counter()
            await asyncio.to_thread(self.controller.to_device)
            self.is_loaded = True
            self.seconds += time.perf_counter() - began

    async def end(self) -> None:
        """Move weights and moments to the host, and give the device to the engine."""
        self.seconds = 0.0
        if self.lease is not None and self.is_locked:
            began = time.perf_counter()
            await asyncio.to_thread(self.controller.to_host)
            self.is_loaded = self.is_locked = False
            self.lease.release()
            self.seconds = time.perf_counter() - began
