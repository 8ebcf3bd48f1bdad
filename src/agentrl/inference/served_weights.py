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
from agentrl.inference.live_weights import LiveLoader, PartlyLoadedError, is_reachable
from agentrl.weights.local_copy import LocalCopy
from agentrl.weights.model_folder import verify

if TYPE_CHECKING:
    from agentrl.store.client import Store


log = logging.getLogger(__name__)


class ServedWeights:
    """The weights of one engine. The engine is paused for ``load`` alone."""

    def __init__(self, client: EngineControl, store: Store, copy: LocalCopy, *, loaded: int = 0) -> None:
        """``loaded`` is the version that the engine starts with, in ``copy`` unless it is loaded in place."""
        self._client = client
        self._store = store
        self._copy = copy
        self._loaded = loaded
        self._ready: dict[int, PolicyVersion] = {}
        """By the version that was fetched last: what can be loaded for it."""
        self.needs_full = False
        """Whether the version that was fetched last needs a delta that is damaged or missing."""
        self._live = LiveLoader(client)

    def started(self) -> None:
        """Let the copy change: the engine has read it."""
        self._copy.release()

    async def fetch(self, version: PolicyVersion) -> None:
        """Make ``version`` ready to be loaded. Raises PublishError if it is damaged, or out of reach."""
        if self._is_live(version):
            return  # it comes from the trainer's memory when it is loaded
        if not version.is_stored:
            raise PublishError(
                "it is only in the memory of a trainer that this engine does not reach; the next stored"
                " version is loaded"
            )
        try:
            ready = await self._copy.bring(self._store, version)
            if ready.id <= self._loaded < version.id:
                raise PublishError(f"it cannot be had, and the newest that can is version {ready.id}")
        except PublishError:
            self.needs_full = version.encoding == "delta"
            raise
        self._ready, self.needs_full = {version.id: ready}, ready.id < version.id

    async def load(self, version: PolicyVersion) -> int:
        """Load ``version``, which was fetched; return the number of the version that is served then.

        It is another one if the copy that this host's engines share holds another one, and after a failure
        that left the engine with a part of ``version``. Raises PublishError or EngineError; the engine then
        keeps its weights, unless it is a PartlyLoadedError.
        """
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
                self._loaded = version.id
                return version.id
        ready = self._ready.get(version.id, version)
        return await self._load_held(*await self._copy.hold(self._store, ready))

    async def _load_held(self, version: PolicyVersion, folder: str) -> int:
        try:
            await self._client.update_weights(folder, version.id)
        finally:
            self._copy.release()
        self._loaded = version.id
        return version.id

    def _is_live(self, version: PolicyVersion) -> bool:
        """Return whether ``version`` may come from the trainer's memory."""
        return version.live is not None and self._client.takes_live_weights and is_reachable(version.live)

    async def _restore(self, error: PartlyLoadedError) -> int:
        """Load the newest stored version in place of a mixture; raise ``error`` if that fails too."""
        try:
            stored = await _hold_newest(self._store, self._copy, None)
            if stored is None:
                raise error
            return await self._load_held(*stored)
        except (PublishError, EngineError) as failure:
            raise error from failure


async def starting_weights(store: Store, model: ModelConfig, copy: LocalCopy) -> tuple[int, str]:
    """Return the number and the folder of the newest intact version; else 0 and ``--model_name_or_path``.

    ``copy`` is held if the version is in it. Raises PublishError if versions are published and none of them
    is intact.
    """
    base = None if model.model_name_or_path is None else str(Path.cwd() / model.model_name_or_path)
    found = await _hold_newest(store, copy, base)
    if found is not None:
        version, folder = found
        return version.id, folder
    if base is None:
        raise ConfigError(
            "there is no published version to serve, and no model to start from",
            hint="pass --model_name_or_path",
        )
    return 0, base


async def _hold_newest(store: Store, copy: LocalCopy, base: str | None) -> tuple[PolicyVersion, str] | None:
    """Hold the newest version that can be had; return it and its folder, None if none is published.

    ``base`` replaces the folder of version 0, which may be on the trainer's host alone, if it has its files.
    """
    from agentrl.weights.publish import published_versions

    refused: PublishError | None = None
    async for version in published_versions(store):
        if not version.is_stored:
            continue
        try:
            return await copy.hold(store, await copy.bring(store, version))
        except PublishError as error:
            if version.id == 0 and base is not None:
                with contextlib.suppress(PublishError):
                    await asyncio.to_thread(verify, base, version.files)
                    return version, base
            log.error("version %d refused: %s", version.id, error.message)
            refused = refused or error
    if refused is not None:
        raise refused
    return None
