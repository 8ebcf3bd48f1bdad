"""The trainer's turns on a device that it has together with engines (``--colocate``)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from agentrl.device_lease import DeviceLease
from agentrl.train.controller import Controller


@dataclass(kw_only=True)
class DeviceTurns:
    """Holds the device from a step's data until its weights are copied to the host; always, without a lease.

    The trainer is built in its first turn.
    """

    lease: DeviceLease | None
    controller: Controller
    is_held: bool = True
    seconds: float = 0.0
    """Waiting until the engine gives way, and moving weights and moments, since ``take_seconds``."""

    async def begin(self) -> None:
        """Begin a turn if none has begun: weights and moments are on the device then."""
        if self.lease is None or self.is_held:
            return
        began = time.perf_counter()
        await self.lease.acquire(urgent=True)
        await asyncio.to_thread(self.controller.to_device)
        self.is_held = True
        self.seconds += time.perf_counter() - began

    async def end(self) -> None:
        """Move weights and moments to the host, and give the device to the engine."""
        if self.lease is None or not self.is_held:
            return
        began = time.perf_counter()
        await asyncio.to_thread(self.controller.to_host)
        self.is_held = False
        self.lease.release()
        self.seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """Return ``seconds``, and count from 0 again."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
