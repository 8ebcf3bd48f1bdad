"""One engine that a run serves: its heartbeats, the versions that it loads, and its turns on a device."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentrl.base.concurrency import task_group
from agentrl.base.device_lease import DeviceLease, has_gpu, leased_devices
from agentrl.base.processes import has_ended, identify, is_observable
from agentrl.chat.model_folder import tokenizer_fingerprint
from agentrl.config.load import Configs
from agentrl.config.schema import AdapterConfig, EngineConfig, ModelConfig, RunConfig
from agentrl.documents.run import InferenceService, LiveShare, LiveWeights, PolicyVersion
from agentrl.documents.status import ServiceStatus
from agentrl.errors import AgentRLError, ConfigError, EngineError, PublishError
from agentrl.inference.client import EngineClient, EngineLoad
from agentrl.inference.engine import EngineRefusedError, adapter_name, known_format
from agentrl.inference.engines.clients import AttachedEngine, engine_client
from agentrl.inference.engines.commands import (
    EngineProcess,
    engine_command,
    free_port,
    require_free_port,
    why_merged,
)
from agentrl.inference.http import EngineHttp
from agentrl.store.mechanics.retry import log_store_errors, retry_outages
from agentrl.weights.folder import MERGED, base_folder, merged_model, require_weights, verify
from agentrl.weights.local_copy import LocalCopy, chain_to, weights_dir

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.weights.live import GroupBackend, WeightRequests


log = logging.getLogger(__name__)


class PartlyLoadedError(EngineError):
    """An update failed midway, and the engine may hold a mixture of two versions."""


class LiveLoader:
    """Loads live versions into one engine, which is paused meanwhile."""

    def __init__(self, client: EngineClient) -> None:
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
            self._requests[address] = requests
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


CHECK_SECONDS = 10.0
"""Time between two looks whether the router still knows the engine."""
_UNREGISTER_SECONDS = 5.0


class FrontRouter:
    """The workers of one sglang-router (``/workers``)."""

    def __init__(self, url: str) -> None:
        self._http = EngineHttp(url)

    async def keep(self, worker_url: str) -> None:
        """Register ``worker_url``, and again whenever the router has lost it; run until cancelled."""
        failed = False
        while True:
            try:
                if await self._worker_id(worker_url) is None:
                    await self._http.respond("POST", "/workers", {"url": worker_url}, statuses=(200, 202))
                    log.info("registered at the router %s", self._http.url)
                failed = False
            except EngineError as error:
                if not failed:
                    log.warning("not registered at the router: %s; trying again", error.message)
                failed = True
            await asyncio.sleep(CHECK_SECONDS)

    async def leave(self, worker_url: str) -> None:
        """Remove ``worker_url`` from the router, so that it sends no more calls; then close."""
        with contextlib.suppress(EngineError, TimeoutError):  # the router's health check removes it later
            async with asyncio.timeout(_UNREGISTER_SECONDS):
                worker = await self._worker_id(worker_url)
                if worker is not None:
                    await self._http.respond("DELETE", f"/workers/{worker}", statuses=(200, 202))
        await self._http.close()

    async def _worker_id(self, worker_url: str) -> str | None:
        """Return the id of the worker at ``worker_url``; None if the router has none."""
        answer = await self._http.call("GET", "/workers")
        with known_format(f"{self._http.url}/workers", answer):
            return next((str(w["id"]) for w in answer.get("workers", []) if w["url"] == worker_url), None)


_KEPT = 4
"""Adapters of a run that stay loaded: a sampler names the one that it read a few seconds ago."""
_LEAVE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an engine serves, as its heartbeats report it."""

    version: int
    """The policy version: that of the adapter, or of the whole weights."""
    whole: int | None
    """The version of the whole weights; None while the trainer has their memory."""
    adapter: str | None = None
    """The adapter that requests must name; None while the engine serves whole weights."""


class ServedWeights:
    """The weights of one engine: fetches versions to its host, and loads them.

    A version is fetched while requests run. The engine is paused for ``load`` alone, and not for an adapter.
    """

    def __init__(
        self,
        client: EngineClient,
        store: Store,
        copy: LocalCopy,
        *,
        run_name: str,
        version: int = 0,
        folder: str = "",
        why_merged: str | None = None,
        is_shared: bool = False,
    ) -> None:
        """The engine starts with the whole weights ``version`` in ``folder``.

        ``why_merged`` says why the engine loads no adapters. A shared engine belongs to another process: it
        gets adapters only.
        """
        self.loaded = Loaded(version, version)
        self.folder = folder
        self.needs_full = False
        """Whether the version that was fetched last needs a delta that is damaged or missing."""
        self._first = version
        self._client = client
        self._store = store
        self._copy = copy
        self._run_name = run_name
        self._why_merged = why_merged
        self._is_shared = is_shared
        self._live = LiveLoader(client)
        self._ready: dict[int, PolicyVersion] = {}
        """By the version that was fetched last: what can be loaded for it."""
        self._takes_deltas = True
        """Whether the engine changes elements of its weights in place: the local one, until it refuses."""
        self._prepared: int | None = None
        """The version for which the engine has read the changed elements."""
        self._ahead: PolicyVersion | None = None
        """The version to which the engine has changed its weights while the copy stayed behind."""
        self._merged: Path | None = None
        self._adapters: list[str] = []
        """This run's adapters in the engine, the newest last."""
        self._unloading: set[asyncio.Task[None]] = set()

    def started(self) -> None:
        """Let the copy change: the engine has read it."""
        self._copy.release()

    def pauses(self, version: PolicyVersion) -> bool:
        """Return whether the engine must be paused while ``version`` is loaded: its whole weights change."""
        is_adapter = version.encoding == "adapter" and self._why_merged is None
        return not is_adapter or version.base != self.loaded.whole

    async def fetch(self, version: PolicyVersion) -> None:
        """Make ``version`` ready to be loaded.

        Raises PublishError if it is damaged or out of reach, or has other whole weights than a shared engine,
        and ModelError if it cannot be merged.
        """
        if self._is_shared and self.pauses(version):
            raise PublishError(
                "it has other whole weights than the engine, which other runs may use",
                hint="train an adapter of the engine's model (--lora_rank), or serve this run without"
                " --engine_url",
            )
        if self._is_live(version):
            return  # it comes from the trainer's memory when it is loaded
        if not version.is_stored:
            raise PublishError(
                "it is only in the memory of a trainer that this engine does not reach; the next stored"
                " version is loaded"
            )
        if version.encoding == "delta" and await self._prepare(version):
            self._ready, self.needs_full = {version.id: version}, False
            return
        try:
            ready = await self._copy.bring(self._store, version)
            if ready.id <= self.loaded.version < version.id:
                raise PublishError(f"it cannot be had, and the newest that can is version {ready.id}")
        except PublishError:
            self.needs_full = version.encoding == "delta"
            raise
        self._ready, self.needs_full = {version.id: ready}, ready.id < version.id
        if ready.encoding == "adapter" and self._why_merged is not None:
            await self._merge(ready, self._why_merged)

    async def _prepare(self, version: PolicyVersion) -> bool:
        """Let the engine read what a delta changes in its weights; return False if it does not."""
        self._prepared, whole = None, self.loaded.whole
        if not self._takes_deltas or whole is None:
            return False
        try:
            files = await self._copy.hold_deltas(self._store, version, whole)
            if files:
                await self._client.prepare_delta(files, whole)
                self._prepared = version.id
        except PublishError as error:
            log.debug("the copy is brought to version %d instead: %s", version.id, error.message)
        except EngineError as error:
            self._takes_deltas = not isinstance(error, EngineRefusedError)
            log.info("the engine loads version %d from the copy: %s", version.id, error.message)
        finally:
            self._copy.release()
        return self._prepared is not None

    async def _merge(self, version: PolicyVersion, why: str) -> None:
        """Merge the adapter ``version``, which is in the copy, into its base."""
        if self._merged is None:
            log.info("adapters are merged into whole weights for this engine: %s", why)
        base = (await chain_to(self._store, version))[0]
        try:
            _, adapter = await self._copy.hold(self._store, version)
            model = (self.folder if base.id == self._first else "") or base.location
            merged = await merged_model(Path(adapter), model, MERGED / self._run_name)
        finally:
            self._copy.release()
        if self._merged not in (None, merged):
            await asyncio.to_thread(shutil.rmtree, self._merged, ignore_errors=True)
        self._merged = merged

    async def load(self, version: PolicyVersion) -> None:
        """Load ``version``, which was fetched, and note in ``loaded`` what the engine serves then.

        It serves another version if the copy that this host's engines share holds another one, and after a
        failure that left the engine with a part of ``version``. Raises PublishError or EngineError; the
        engine then keeps its weights, unless it is a PartlyLoadedError.
        """
        if version.encoding == "adapter":
            await self._load_adapter(version)
            return
        if self._is_live(version):
            try:
                await self._live.load(version)
            except PartlyLoadedError as error:
                log.error("version %d arrived in part: %s", version.id, error.message)
                await self._restore(error)
                return
            except (PublishError, EngineError) as error:
                if not version.is_stored:
                    raise
                log.warning("version %d comes from the disk: %s", version.id, error.message)
                await self._copy.bring(self._store, version)
            else:
                self.loaded = Loaded(version.id, version.id)
                return
        if self._prepared == version.id:
            self._prepared = None
            try:
                await self._client.apply_delta(version.id)
            except EngineError as error:
                log.warning("version %d comes from the copy: %s", version.id, error.message)
            else:
                self._ahead, self.loaded = version, Loaded(version.id, version.id)
                return
        ready = self._ready.get(version.id, version)
        await self._load_folder(*await self._copy.hold(self._store, ready))

    async def _load_folder(self, version: PolicyVersion, folder: str) -> None:
        """Load the whole weights ``version`` from ``folder``, then release the copy."""
        try:
            await self._client.update_weights(folder, version.id)
        finally:
            self._copy.release()
        self.loaded = Loaded(version.id, version.id)

    async def _load_adapter(self, version: PolicyVersion) -> None:
        """Load an adapter, and before it its base if the engine has another one.

        Running requests keep the adapter that they began with.
        """
        if self._merged is not None:
            await self._client.update_weights(str(self._merged), version.id)
            self.loaded = Loaded(version.id, version.id)
            return
        base = (await chain_to(self._store, version))[0]
        name = adapter_name(self._run_name, version.id)
        try:
            if base.id != self.loaded.whole:
                # Name no adapter while its base changes: heartbeats go out meanwhile, and samplers read them.
                self.loaded = replace(self.loaded, adapter=None)
                folder = self.folder if base.id == self._first else ""
                folder = folder or (await self._copy.hold(self._store, base))[1]
                await self._client.update_weights(folder, base.id)
                self.loaded = replace(self.loaded, whole=base.id)
            _, folder = await self._copy.hold(self._store, version)
            in_engine = await self._client.load_adapter(name, folder)
        finally:
            self._copy.release()
        self.loaded = Loaded(version.id, base.id, name)
        self._adapters = [*(each for each in self._adapters if each != name), name][-_KEPT:]
        for each in in_engine - set(self._adapters):
            # Unload this run's alone: a shared engine has the adapters of other runs too.
            if each.rpartition("@")[0] == self._run_name:
                task = asyncio.create_task(self._unload(each))  # SGLang waits for the adapter's requests
                self._unloading.add(task)
                task.add_done_callback(self._unloading.discard)

    async def _restore(self, error: PartlyLoadedError) -> None:
        """Load the newest stored version in place of a mixture; raise ``error`` if that fails too."""
        try:
            stored = await _hold_newest(self._store, self._copy, None)
            if stored is None:
                raise error
            whole, folder, adapter = stored
            await self._load_folder(whole, folder)
            if adapter is not None:
                await self.load(adapter)
        except (PublishError, EngineError) as failure:
            raise error from failure

    def _is_live(self, version: PolicyVersion) -> bool:
        """Return whether ``version`` may come from the trainer's memory."""
        return version.live is not None and self._client.takes_live_weights and is_reachable(version.live)

    async def release_memory(self) -> None:
        """Give the engine's memory back to the system; ``reload`` brings the weights again."""
        await self._client.release_memory()
        # Forget the whole weights: an adapter needs its base again, and no delta can change them.
        self.loaded = replace(self.loaded, whole=None)

    async def reload(self, version: PolicyVersion | None) -> None:
        """Load ``version``, or the weights with which the engine started, after ``release_memory``."""
        if version is not None:
            await self.load(version)
        else:
            await self._client.update_weights(self.folder, self._first)
            self.loaded = Loaded(self._first, self._first)

    async def keep_up(self) -> None:
        """Bring the copy to the version that the engine has by deltas: others read it, and a restart does."""
        version, self._ahead = self._ahead, None
        if version is None:
            return
        try:
            held = await self._copy.bring(self._store, version)
            self.needs_full = held.id < version.id
        except PublishError as error:
            self.needs_full = True
            log.warning("the copy stays behind version %d: %s", version.id, error.message)

    async def leave(self) -> None:
        """Unload this run's adapters from a shared engine; another engine ends with this process."""
        if self._is_shared:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await asyncio.gather(*map(self._unload, self._adapters))

    async def _unload(self, name: str) -> None:
        with contextlib.suppress(EngineError):
            await self._client.unload_adapter(name)


async def starting_weights(
    store: Store, model: ModelConfig, copy: LocalCopy
) -> tuple[int, str, PolicyVersion | None]:
    """Return the number and the folder of the newest intact version; else 0 and ``--model_name_or_path``.

    Of an adapter these are its base's, and the third value is its version. ``copy`` is held if the whole
    weights are in it. Raises PublishError if versions are published and none of them is intact.
    """
    base = None if model.model_name_or_path is None else str(Path.cwd() / model.model_name_or_path)
    found = await _hold_newest(store, copy, base)
    if found is not None:
        whole, folder, adapter = found
        return whole.id, folder, adapter
    if base is None:
        raise ConfigError(
            "there is no published version to serve, and no model to start from",
            hint="pass --model_name_or_path",
        )
    return 0, base, None


async def _hold_newest(
    store: Store, copy: LocalCopy, base: str | None
) -> tuple[PolicyVersion, str, PolicyVersion | None] | None:
    """Hold the newest version that can be had; return its whole weights, their folder, and its adapter.

    The result is None if no version is published. ``base`` replaces the folder of version 0, which may be on
    the trainer's host alone, if it has its files.
    """
    from agentrl.weights.publish import published_versions

    refused: PublishError | None = None
    async for version in published_versions(store):
        if not version.is_stored:
            continue
        adapter, whole = None, version
        try:
            if version.encoding == "adapter":
                adapter, whole = version, (await chain_to(store, version))[0]
                await copy.bring(store, adapter)
            return *await copy.hold(store, await copy.bring(store, whole)), adapter
        except PublishError as error:
            if whole.id == 0 and base is not None:
                with contextlib.suppress(PublishError):
                    await asyncio.to_thread(verify, base, whole.files)
                    return whole, base, adapter
            log.error("version %d refused: %s", version.id, error.message)
            refused = refused or error
    if refused is not None:
        raise refused
    return None


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
        weights: ServedWeights,
        first: PolicyVersion | None = None,
        lease: DeviceLease | None = None,
    ) -> None:
        """``lease`` is the held one of a device that the trainer uses too; None for a device of its own.

        ``first`` is an adapter of the whole weights of ``weights``, loaded before samplers send requests.
        """
        self._store = store
        self._client = client
        self._weights = weights
        self._process = process
        self._config = config
        self._id = service_id
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
            model=self._weights.folder,
            policy_version=self._weights.loaded.version,
            gpus=self._config.inf_tp_size,
            host=socket.gethostname(),
            pid=self._process.pid,
            instance=self._process.instance,
            process=identify(os.getpid()),
            tokenizer=await asyncio.to_thread(tokenizer_fingerprint, self._weights.folder),
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
            # Retry nothing: an engine that ends in an outage would hang for --db_wait_seconds.
            with log_store_errors(log, message, outages=True), retry_outages(0):
                await self._store.services.stop(self._id)

    async def _start(self) -> None:
        """Wait until the server is ready, load its first adapter, and report that it takes requests."""
        await self._process.wait_ready(self._client, self._config.engine_start_seconds)
        self._weights.started()
        if not isinstance(self._process, AttachedEngine):
            await self._client.set_version(self._weights.loaded.version)
        if self._fetched is not None:
            await self._weights.fetch(self._fetched)
            await self._weights.load(self._fetched)
        self._context_length = (await self._client.model_info()).context_length
        self._status = ServiceStatus.READY
        log.info("engine is ready at %s with version %d", self._client.url, self._weights.loaded.version)
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
                # Bound the question: a slow answer must not delay the heartbeat that keeps the engine listed.
                async with asyncio.timeout(self._config.heartbeat_seconds):
                    self._load = await self._client.load()
        loaded = self._weights.loaded
        with log_store_errors(log, "no heartbeat; the engine keeps running"):
            await self._store.services.beat(
                self._id,
                status=self._status,
                policy_version=loaded.version,
                adapter=loaded.adapter,
                running_requests=self._load.requests,
                running_tokens=self._load.tokens,
                figures=self._load.figures,
                context_length=self._context_length,
                detail=self._detail,
                needs_full=self._weights.needs_full,
            )

    async def _follow(self) -> None:
        """Load each newer version; one that could not be fetched is tried again."""
        from agentrl.weights.publish import newer_versions

        newest = self._weights.loaded.version
        while True:
            with log_store_errors(log, "published versions cannot be read; retrying"):
                async for version in newer_versions(
                    self._store, after=newest, poll_seconds=_FOLLOW_POLL_SECONDS
                ):
                    newest = version.id
                    if not await self.update(version):
                        await self._store.wait_for_change("PolicyVersion", timeout=_REFETCH_SECONDS)
                        # Begin again behind the served version: the iteration is past the failed one.
                        newest = self._weights.loaded.version
                        break
            await asyncio.sleep(_FOLLOW_POLL_SECONDS)

    async def update(self, version: PolicyVersion) -> bool:
        """Load ``version``; if it is damaged, the old weights stay. Return whether it was fetched.

        Running requests continue with it, or finish with their adapter, if it is one.
        """
        is_fetched = False
        try:
            # Fetch outside of the turn: a long download would keep the trainer from its device.
            async with self._fetching:
                await self._weights.fetch(version)
                self._fetched = version
            is_fetched = True
            async with self._turn:
                if self._weights.loaded.version != version.id:  # a turn of the trainer may have loaded it
                    # Ask who answers: once an engine has died, another server may listen at its port.
                    await self._client.check_instance(self._process.instance)
                    pauses = self._weights.pauses(version)
                    await (self._switch if pauses else self._weights.load)(version)
        except AgentRLError as error:
            self._detail = f"version {version.id} refused: {error.message}"
            log.error("%s; still serving version %d", self._detail, self._weights.loaded.version)
        else:
            self._detail = None
            log.info("serving version %d", self._weights.loaded.version)
        await self._report()
        # Write the copy after the report: samplers wait for the version, and nobody waits for the copy.
        await self._weights.keep_up()
        return is_fetched

    async def _switch(self, version: PolicyVersion) -> None:
        """Load ``version`` while the engine is paused."""
        self._status = ServiceStatus.UPDATING
        try:
            # Retract: keys and values that stay in place are of the old weights, and change later logprobs.
            await self._client.pause("retract")
            await self._weights.load(version)
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
                    await self._weights.release_memory()
                    lease.release()
                    await lease.acquire()
                    await self._client.resume_memory("weights")
                    async with self._fetching:
                        version = self._weights.loaded.version
                        if self._fetched is None and version:  # the copy that was loaded may have changed
                            self._fetched = await self._store.policy_versions.get(version)
                        await self._weights.reload(self._fetched)
                    await self._client.resume_memory("kv_cache")
                except (EngineError, PublishError) as error:
                    log.error("the engine does not take turns with the trainer, and ends: %s", error.message)
                    await self._process.stop()
                    return
                await self._resume()
                self._status, self._detail = ServiceStatus.READY, before
            await self._report()

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


_UPDATE_SECONDS = 600.0


async def serve(configs: Configs) -> None:
    """Serve the newest policy version, and each newer one, until SIGTERM or SIGINT.

    Raises EngineError if the engine ends by itself.
    """
    from agentrl.store.client import open_store, run_exists

    run, model, config = configs[RunConfig], configs[ModelConfig], configs[EngineConfig]
    is_own = config.engine_url is None
    if not is_own and (config.router_url is not None or config.is_colocated):
        raise ConfigError(
            "--engine_url names an engine of another process, which alone registers it at a --router_url and"
            " lends its device",
            hint="leave --router_url and co-location out",
        )
    if config.port and is_own:
        require_free_port(config.host, config.port)
    with retry_outages(run.db_wait_seconds):
        # A bad folder or engine begins no run. A run that has begun may have weights of its own.
        if not await run_exists(run):
            await _require_engine(model, config)
        async with await open_store(run) as store:
            await _serve(store, configs)


async def _require_engine(model: ModelConfig, config: EngineConfig) -> None:
    """Raise AgentRLError unless an engine can serve the model: one that is started, or that of the URL."""
    folder = base_folder(model)
    require_weights(folder)
    if config.engine_url is None:
        engine_command(str(folder), model, config, config.port)
        return
    async with engine_client(config.engine, config.engine_url, _UPDATE_SECONDS) as client:
        await AttachedEngine.find(client, str(folder), config.engine_start_seconds)


async def _serve(store: Store, configs: Configs) -> None:
    from agentrl.config.agreement import engine_settings
    from agentrl.observe.begin_run import begin_model, begin_run, check_base

    run, model, config = configs[RunConfig], configs[ModelConfig], configs[EngineConfig]
    await begin_run(store, configs, "serve", engine_settings(configs))
    await begin_model(store, model.model_name_or_path, "serve")
    await check_base(store, model.model_name_or_path)
    copy = LocalCopy(await weights_dir(store, config.weights_dir))
    version, folder, first = await starting_weights(store, model, copy)
    lora, stored = configs[AdapterConfig], (await store.settings.all()).get("adapter")
    if not lora.lora_rank and stored is not None:  # the trainer was given it
        lora = AdapterConfig(**stored.values)
    port = config.port or free_port(config.host)
    host = socket.getfqdn() if config.host in ("0.0.0.0", "::") else config.host  # as samplers reach it
    client = engine_client(config.engine, config.engine_url or f"http://{host}:{port}", _UPDATE_SECONDS)
    is_shared = config.engine_url is not None
    weights = ServedWeights(
        client, store, copy, run_name=run.run_name, version=version, folder=folder, is_shared=is_shared,
        why_merged=None if is_shared else why_merged(config.engine, folder, lora),
    )  # fmt: skip
    service_id = f"{socket.gethostname().split('.')[0]}-{urlsplit(client.url).port}-{uuid.uuid4().hex[:6]}"
    lease = None
    if config.is_colocated:
        devices = leased_devices(run.output)
        lease = DeviceLease(devices, f"the engine of run {run.run_name}", shared=not has_gpu())
        await lease.acquire()
    process: EngineProcess | AttachedEngine
    if is_shared:
        process = await AttachedEngine.find(client, folder, config.engine_start_seconds)
    else:
        command = engine_command(folder, model, config, port, lora)
        log_file = Path(run.log_dir) / f"{run.run_name}_{config.engine}_{service_id}.log"
        # The engine has the locks too: the device is free when it has ended, also if this process is killed.
        process = EngineProcess(command, log_file, () if lease is None else lease.locks)
    served = ServedEngine(
        store, client, process, config, service_id=service_id, weights=weights, first=first, lease=lease
    )  # fmt: skip
    try:
        await _until_signal(served.run)
    finally:
        await weights.leave()
        await client.close()
        await process.stop()


async def _until_signal(work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` to its end; cancel it on SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
