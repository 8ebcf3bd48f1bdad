"""Inject the planned faults into a run, and undo them."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from waiting import comes_true

from agentrl.documents.status import EpochStatus
from agentrl.errors import StoreError
from chaos.actors import Actor
from chaos.database import Database
from chaos.plan import DATABASE, Fault, FaultKind
from chaos.proxy import Proxy

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

FULL_BYTES = 1 << 20
"""RLIMIT_FSIZE of a trainer that simulates a full disk: its log still fits, a file of weights does not."""

_POLL_SECONDS = 0.01
_REFUSE_SECONDS = 4.0
_ACTIVE_SECONDS = 20.0
"""Time to wait for a version that shows that training is making progress."""

_LOOK_SECONDS = 0.5
_OPENING_SECONDS = 20.0
_TAKEOVER_SECONDS = 90.0
"""Time for a trainer to start in place of a frozen one."""

_REFUSED_SECONDS = 90.0
"""Time for a superseded trainer to notice: it computes and writes one step at most."""

_FLIPPED = 0x40
_RECOVERY_SECONDS = 5.0
"""Minimum time between two database faults, so that an outage never lasts longer than processes wait."""


@dataclass
class Injector:
    """Injects faults, one at a time per process; ``done`` counts them."""

    actors: Mapping[str, Actor]
    proxies: Mapping[str, Proxy]
    database: Database
    weights: Path
    store: Store
    """The run's store, to observe its progress."""
    done: Counter[str] = field(default_factory=Counter)
    _ends: float = float("inf")
    _database_busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    _weights_busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, plan: list[Fault], seconds: float) -> None:
        """Inject every fault of the plan at its time, and undo each after its duration.

        A fault that waits for another one is skipped if it cannot start within ``seconds``.
        """
        started = time.monotonic()
        self._ends = started + seconds
        async with asyncio.TaskGroup() as tasks:
            for fault in plan:
                await asyncio.sleep(max(0.0, started + fault.at - time.monotonic()))
                tasks.create_task(self.inject(fault))

    async def inject(self, fault: Fault) -> None:
        """Inject one fault and undo it after its duration."""
        logger.info("%s %s for %.1f s", fault.kind, fault.target, fault.seconds)
        if fault.kind is FaultKind.CORRUPT:
            await self._corrupt(fault)
        elif fault.target == DATABASE:
            async with self._database_busy:
                if time.monotonic() > self._ends:
                    return
                if fault.kind is FaultKind.FREEZE:
                    await self._freeze_database(fault.seconds)
                else:
                    await self.database.kill(fault.seconds)
                self.done[f"{fault.kind} {DATABASE}"] += 1
                await asyncio.sleep(_RECOVERY_SECONDS)
        elif fault.kind in (FaultKind.CUT, FaultKind.STALL, FaultKind.DELAY):
            await self._disturb(fault, self.proxies[fault.target])
        else:
            await self._strike(fault, self.actors[fault.target])

    async def _strike(self, fault: Fault, actor: Actor) -> None:
        async with actor.busy:
            if time.monotonic() > self._ends:
                return
            if fault.kind is FaultKind.KILL:
                hit = await actor.kill()
                await asyncio.sleep(fault.seconds)
                if actor.process is None:
                    actor.start()
            elif fault.kind is FaultKind.FREEZE:
                hit = actor.freeze()
                try:
                    await asyncio.sleep(fault.seconds)
                finally:
                    actor.thaw()
            elif fault.kind is FaultKind.SUPERSEDE:
                hit = await self._supersede(actor, fault.seconds)
            else:
                hit = await self._fill(actor, fault.seconds)
        if hit:
            self.done[f"{fault.kind} {actor.role}"] += 1

    async def _supersede(self, actor: Actor, seconds: float) -> bool:
        """Freeze the trainer past its lease, start another, then resume the first, which must end."""
        attempt = await self._attempt()
        frozen = actor.set_aside() if attempt is not None else None
        if attempt is None or frozen is None:
            return False
        is_replaced = False
        try:
            await asyncio.sleep(seconds)
            actor.start()
            is_replaced = await self._is_replaced(attempt)
        finally:
            await actor.end_superseded(frozen, _REFUSED_SECONDS if is_replaced else 0.0)
        return is_replaced

    async def _is_replaced(self, attempt: int) -> bool:
        """Wait for a trainer with a later attempt; return False if none starts in time."""

        async def is_later() -> bool:
            return (await self._attempt() or 0) > attempt

        return await comes_true(is_later, _TAKEOVER_SECONDS, _LOOK_SECONDS)

    async def _attempt(self) -> int | None:
        """Return the attempt of the last trainer; None while the database is unavailable."""
        try:
            return (await self.store.trainer_lease.read()).attempt
        except StoreError:
            return None

    async def _freeze_database(self, seconds: float) -> None:
        """Freeze the database while an epoch is being opened, if that happens within ``_OPENING_SECONDS``."""
        await comes_true(self._is_opening, _OPENING_SECONDS, _LOOK_SECONDS)
        await self.database.freeze(seconds)

    async def _is_opening(self) -> bool:
        try:
            opening = await self.store.connection.call(
                lambda: self.store.database["Epoch"].find_one({"status": EpochStatus.OPENING.value}),
                "openings",
            )
        except StoreError:
            return False
        if opening is not None:
            self.done["openings interrupted"] += 1
        return opening is not None

    async def _fill(self, actor: Actor, seconds: float) -> bool:
        """Limit the size of the process's files to 1 MiB, so that its writes fail as on a full disk.

        They fail with EFBIG; no file system has to be filled or mounted.
        """
        pid = actor.pid
        if pid is None:
            return False
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
        try:
            await asyncio.sleep(seconds)
        finally:
            if actor.pid == pid:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
        return True

    async def _disturb(self, fault: Fault, proxy: Proxy) -> None:
        if fault.kind is FaultKind.CUT:
            proxy.cut()
        elif fault.kind is FaultKind.STALL:
            proxy.stall()
        else:
            proxy.latency = fault.latency
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            proxy.restore()
        self.done[f"{fault.kind} connections"] += 1

    async def _corrupt(self, fault: Fault) -> None:
        """Freeze the engines, damage the next published version, let the engines try it, and repair it."""
        engines = [actor for actor in self.actors.values() if actor.role == "engine"]
        async with self._weights_busy, _All(engines):
            await self._next_version(_ACTIVE_SECONDS)
            for engine in engines:
                engine.freeze()
            try:
                version = await self._next_version(fault.seconds)
                damaged = version is not None and _flip(version)
            finally:
                for engine in engines:
                    engine.thaw()
            if version is None or not damaged:
                logger.info("no version was published in time to damage it")
                return
            try:
                await asyncio.sleep(_REFUSE_SECONDS)
            finally:
                _flip(version)
        self.done["corrupt weights"] += 1

    async def _next_version(self, seconds: float) -> Path | None:
        """Return the weights file of the next published version; None if there is none within ``seconds``."""
        known = self._newest()
        is_there = await comes_true(lambda: self._newest() > known, seconds, _POLL_SECONDS)
        return self.weights / self._newest() / "model.safetensors" if is_there else None

    def _newest(self) -> str:
        return max((path.name for path in self.weights.glob("v[0-9]*")), default="")


class _All:
    """Holds the ``busy`` lock of every actor."""

    def __init__(self, actors: list[Actor]) -> None:
        self._actors = actors

    async def __aenter__(self) -> None:
        for actor in self._actors:
            await actor.busy.acquire()

    async def __aexit__(self, *_: object) -> None:
        for actor in self._actors:
            actor.busy.release()


def _flip(path: Path) -> bool:
    """Flip a bit in the middle of a file; a second call restores it. Return False if the file is gone."""
    try:
        with path.open("r+b") as file:
            middle = path.stat().st_size // 2
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ _FLIPPED]))
    except FileNotFoundError:
        return False
    return True
