"""One engine that a run serves: its heartbeats, the versions that it loads, and its turns on a device."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING

from agentrl.chat.model_folder import tokenizer_fingerprint
from agentrl.concurrency import task_group
from agentrl.config.schema import EngineConfig
from agentrl.device_lease import DeviceLease
from agentrl.documents.run import InferenceService, PolicyVersion
from agentrl.documents.status import ServiceStatus
from agentrl.errors import AgentRLError, EngineError, PublishError
from agentrl.inference.client import EngineClient
from agentrl.inference.control import EngineLoad
from agentrl.inference.engines.attached import AttachedEngine
from agentrl.inference.engines.process import EngineProcess
from agentrl.inference.front_router import FrontRouter
from agentrl.inference.live_weights import PartlyLoadedError
from agentrl.inference.served_weights import ServedWeights
from agentrl.store.mechanics.retry import log_store_errors, retry_outages

if TYPE_CHECKING:
    from agentrl.store.client import Store


log = logging.getLogger(__name__)

_FOLLOW_POLL_SECONDS = 2.0
_REFETCH_SECONDS = 30.0
_RESUME_TRIES = 5


class ServedEngine:
    """An engine process and its InferenceService document: heartbeats, and updates to new versions."""

    def __init__(
        self,
        store: Store,
        client: EngineClient,
        process: EngineProcess | AttachedEngine,
        config: EngineConfig,
        *,
        service_id: str,
        folder: str,
        version: int,
        weights: ServedWeights,
        first: PolicyVersion | None = None,
        lease: DeviceLease | None = None,
    ) -> None:
        """``lease`` is the held one of a device that the trainer uses too; None for a device of its own.

        ``first`` is an adapter of the ``version`` in ``folder``, loaded before samplers send requests.
        """
        self._store = store
        self._client = client
        self._weights = weights
        self._process = process
        self._config = config
        self._id = service_id
        self._folder = folder
        self._version = version
        self._status = ServiceStatus.STARTING
        self._front = None if config.router_url is None else FrontRouter(config.router_url)
        self._load = EngineLoad(requests=0)
        self._context_length: int | None = None
        self._detail: str | None = None
        self._lease = lease
        self._turn = asyncio.Lock()
        """Held while the engine is paused, for new weights or while the trainer has the device."""
        self._fetched = first
        """The newest version that can be loaded."""
        self._fetching = asyncio.Lock()

    async def run(self) -> None:
        """Run until cancelled.

        Raises EngineError if the engine does not start or ends, and StoreUnavailableError if the database
        is unavailable for longer than ``--db_wait_seconds``.
        """
        service = InferenceService(
            id=self._id,
            url=self._client.url,
            engine=self._config.engine,
            model=self._folder,
            policy_version=self._version,
            host=socket.gethostname(),
            pid=self._process.pid,
            instance=self._process.instance,
            tokenizer=await asyncio.to_thread(tokenizer_fingerprint, self._folder),
        )
        await self._store.services.register(service)
        try:
            async with task_group() as tasks:
                tasks.create_task(self._watch_process())
                tasks.create_task(self._send_heartbeats())
                await self._start()
                tasks.create_task(self._follow())
                if self._lease is not None:
                    tasks.create_task(self._lend(self._lease))
                if self._front is not None:
                    tasks.create_task(self._front.keep(self._client.url))
        finally:
            if self._front is not None:
                await self._front.leave(self._client.url)
            message = "the end of the engine is not recorded; its heartbeat expires"
            with log_store_errors(log, message, outages=True), retry_outages(0):
                await self._store.services.stop(self._id)

    async def _start(self) -> None:
        """Wait until the server is ready, load its first adapter, and report that it takes requests."""
        await self._process.wait_ready(self._client, self._config.engine_start_seconds)
        self._weights.started()
        if not isinstance(self._process, AttachedEngine):
            await self._client.set_version(self._version)
        if self._fetched is not None:
            await self._weights.fetch(self._fetched)
            self._version = await self._weights.load(self._fetched)
        self._context_length = (await self._client.model_info()).context_length
        self._status = ServiceStatus.READY
        log.info("engine is ready at %s with version %d", self._client.url, self._version)
        await self._report()

    async def _watch_process(self) -> None:
        """Raise EngineError once the engine's process has ended."""
        while True:
            await self._process.check(self._client)
            await asyncio.sleep(self._config.heartbeat_seconds)

    async def _send_heartbeats(self) -> None:
        """Report status, version and load every ``heartbeat_seconds``."""
        while True:
            await self._report()
            await asyncio.sleep(self._config.heartbeat_seconds)

    async def _report(self) -> None:
        """Report once; the next heartbeat repeats what the database does not take."""
        if self._status is not ServiceStatus.STARTING:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(self._config.heartbeat_seconds):
                    self._load = await self._client.load()
        with log_store_errors(log, "no heartbeat; the engine keeps running"):
            await self._store.services.beat(
                self._id,
                status=self._status,
                policy_version=self._version,
                adapter=self._weights.adapters.name,
                running_requests=self._load.requests,
                running_tokens=self._load.tokens,
                context_length=self._context_length,
                detail=self._detail,
                needs_full=self._weights.needs_full,
            )

    async def _follow(self) -> None:
        """Load each newer version; one that could not be fetched is tried again."""
        from agentrl.weights.publish import newer_versions

        newest = self._version
        while True:
            with log_store_errors(log, "published versions cannot be read; retrying"):
                async for version in newer_versions(
                    self._store, after=newest, poll_seconds=_FOLLOW_POLL_SECONDS
                ):
                    newest = version.id
                    if not await self.update(version):
                        await self._store.wait_for_change("PolicyVersion", timeout=_REFETCH_SECONDS)
                        newest = self._version
                        break
            await asyncio.sleep(_FOLLOW_POLL_SECONDS)

    async def update(self, version: PolicyVersion) -> bool:
        """Load ``version``; if it is damaged, the old weights stay. Return whether it was fetched.

        Running requests continue with it, or finish with their adapter, if it is one.
        """
        is_fetched = False
        try:
            async with self._fetching:
                await self._weights.fetch(version)
                self._fetched = version
            is_fetched = True
            async with self._turn:
                if self._version != version.id:  # the end of the trainer's turn may have loaded it
                    await self._client.check_instance(self._process.instance)
                    pauses = self._weights.adapters.pauses(version)
                    self._version = await (self._switch if pauses else self._weights.load)(version)
        except AgentRLError as error:
            self._detail = f"version {version.id} refused: {error.message}"
            log.error("%s; still serving version %d", self._detail, self._version)
        else:
            self._detail = None
            log.info("serving version %d", self._version)
        await self._report()
        await self._weights.keep_up()
        return is_fetched

    async def _switch(self, version: PolicyVersion) -> int:
        """Load ``version`` while the engine is paused; return the version that it serves then."""
        self._status = ServiceStatus.UPDATING
        try:
            await self._client.pause("retract")
            return await self._weights.load(version)
        except PartlyLoadedError:
            log.error("the engine holds a mixture of two versions; it ends now")
            await self._process.stop()
            raise
        finally:
            await self._resume()
            self._status = ServiceStatus.READY

    async def _lend(self, lease: DeviceLease) -> None:
        """Give the device to the trainer whenever it wants it, and take it back after its turn.

        Running requests end with the tokens generated so far; samplers continue them on another engine, or
        here afterwards. An engine that does not give its memory back, or does not come back, is ended.
        """
        while True:
            await lease.until_wanted()
            async with self._turn:
                before, self._detail = self._detail, "the trainer has the device"
                self._status = ServiceStatus.LENT
                await self._report()
                try:
                    await self._client.check_instance(self._process.instance)
                    await self._client.pause("abort")
                    await self._client.release_memory()
                    lease.release()
                    await lease.acquire()
                    await self._client.resume_memory("weights")
                    await self._reload()
                    await self._client.resume_memory("kv_cache")
                except (EngineError, PublishError) as error:
                    log.error("the engine does not take turns with the trainer, and ends: %s", error.message)
                    await self._process.stop()
                    return
                await self._resume()
                self._status, self._detail = ServiceStatus.READY, before
            await self._report()

    async def _reload(self) -> None:
        """Load the newest version that was fetched, or the one that the engine started with."""
        async with self._fetching:
            if self._fetched is None and self._version:  # the copy of it that was loaded may have changed
                self._fetched = await self._store.policy_versions.get(self._version)
            if self._fetched is None:
                await self._client.update_weights(self._folder, self._version)
            else:
                self._weights.adapters.whole = None
                self._version = await self._weights.load(self._fetched)

    async def _resume(self) -> None:
        """Resume the engine; end it if it is still paused after ``_RESUME_TRIES`` attempts."""
        for _ in range(_RESUME_TRIES):
            try:
                await self._client.resume()
            except EngineError as error:
                log.error("the engine does not resume: %s; trying again", error.message)
                await asyncio.sleep(self._config.heartbeat_seconds)
            else:
                return
        log.error("the engine stays paused after %d attempts to resume it; it ends now", _RESUME_TRIES)
        await self._process.stop()
