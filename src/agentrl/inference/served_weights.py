"""Bring a published version to one engine: fetch it while the engine generates, then load it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.schema import ModelConfig
from agentrl.documents.run import PolicyVersion
from agentrl.errors import ConfigError, EngineError, PublishError
from agentrl.inference.control import EngineControl
from agentrl.inference.engine import EngineRefusedError
from agentrl.inference.live_weights import LiveLoader, PartlyLoadedError, is_reachable
from agentrl.inference.served_adapters import ServedAdapters
from agentrl.weights.local_copy import LocalCopy, chain_to
from agentrl.weights.model_folder import verify

if TYPE_CHECKING:
    from agentrl.store.client import Store


log = logging.getLogger(__name__)


class ServedWeights:
    """The weights of one engine. The engine is paused for ``load`` alone, and not for an adapter."""

    def __init__(
        self,
        client: EngineControl,
        store: Store,
        copy: LocalCopy,
        adapters: ServedAdapters,
        *,
        loaded: int = 0,
    ) -> None:
        """``loaded`` is the version that the engine starts with, in ``copy`` unless it is loaded in place."""
        self.adapters = adapters
        self._client = client
        self._store = store
        self._copy = copy
        self._loaded = loaded
        self._ready: dict[int, PolicyVersion] = {}
        """By the version that was fetched last: what can be loaded for it."""
        self.needs_full = False
        """Whether the version that was fetched last needs a delta that is damaged or missing."""
        self._live = LiveLoader(client)
        self._takes_deltas = True
        """Whether the engine changes elements of its weights in place: the local one, until it refuses."""
        self._prepared: int | None = None
        """The version for which the engine has read the changed elements."""
        self._ahead: PolicyVersion | None = None
        """The version to which the engine has changed its weights while the copy stayed behind."""

    def started(self) -> None:
        """Let the copy change: the engine has read it."""
        self._copy.release()

    async def fetch(self, version: PolicyVersion) -> None:
        """Make ``version`` ready to be loaded. Raises PublishError if it is damaged, or out of reach."""
        self.adapters.check(version)
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
            if ready.id <= self._loaded < version.id:
                raise PublishError(f"it cannot be had, and the newest that can is version {ready.id}")
        except PublishError:
            self.needs_full = version.encoding == "delta"
            raise
        self._ready, self.needs_full = {version.id: ready}, ready.id < version.id
        await self.adapters.fetch(self._store, ready)

    async def _prepare(self, version: PolicyVersion) -> bool:
        """Let the engine read what a delta changes in its weights; return False if it does not."""
        self._prepared = None
        if not self._takes_deltas:
            return False
        try:
            files = await self._copy.hold_deltas(self._store, version, self._loaded)
            if files:
                await self._client.prepare_delta(files, self._loaded)
                self._prepared = version.id
        except PublishError as error:
            log.debug("the copy is brought to version %d instead: %s", version.id, error.message)
        except EngineError as error:
            self._takes_deltas = not isinstance(error, EngineRefusedError)
            log.info("the engine loads version %d from the copy: %s", version.id, error.message)
        finally:
            self._copy.release()
        return self._prepared is not None

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

    async def load(self, version: PolicyVersion) -> int:
        """Load ``version``, which was fetched; return the number of the version that is served then.

        It is another one if the copy that this host's engines share holds another one, and after a failure
        that left the engine with a part of ``version``. Raises PublishError or EngineError; the engine then
        keeps its weights, unless it is a PartlyLoadedError.
        """
        if version.encoding == "adapter":
            await self.adapters.load(self._store, version)
            return version.id
        if self._is_live(version):
            try:
                await self._live.load(version)
            except PartlyLoadedError as error:
                log.error("version %d arrived in part: %s", version.id, error.message)
                return await self._restore(error)
            except (PublishError, EngineError) as error:
                if not version.is_stored:
                    raise
                log.warning("version %d comes from the disk: %s", version.id, error.message)
                await self._copy.bring(self._store, version)
            else:
                return self._note_whole(version.id)
        if self._prepared == version.id:
            self._prepared = None
            try:
                await self._client.apply_delta(version.id)
            except EngineError as error:
                log.warning("version %d comes from the copy: %s", version.id, error.message)
            else:
                self._ahead = version
                return self._note_whole(version.id)
        ready = self._ready.get(version.id, version)
        return await self._load_held(*await self._copy.hold(self._store, ready))

    async def _load_held(self, version: PolicyVersion, folder: str) -> int:
        try:
            await self._client.update_weights(folder, version.id)
        finally:
            self._copy.release()
        return self._note_whole(version.id)

    def _note_whole(self, version: int) -> int:
        """Note that the engine has the whole weights of ``version``; return it."""
        self._loaded = self.adapters.whole = version
        self.adapters.name = None
        return version

    def _is_live(self, version: PolicyVersion) -> bool:
        """Return whether ``version`` may come from the trainer's memory."""
        return version.live is not None and self._client.takes_live_weights and is_reachable(version.live)

    async def _restore(self, error: PartlyLoadedError) -> int:
        """Load the newest stored version in place of a mixture; raise ``error`` if that fails too."""
        try:
            stored = await _hold_newest(self._store, self._copy, None)
            if stored is None:
                raise error
            whole, folder, adapter = stored
            await self._load_held(whole, folder)
            return whole.id if adapter is None else await self.load(adapter)
        except (PublishError, EngineError) as failure:
            raise error from failure


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
