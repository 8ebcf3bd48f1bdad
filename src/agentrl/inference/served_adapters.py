"""Load the LoRA adapters of a run into an engine while it generates; merge them for one that cannot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.documents.run import PolicyVersion
from agentrl.errors import EngineError, PublishError
from agentrl.inference.control import EngineControl
from agentrl.inference.engine import adapter_name
from agentrl.weights.local_copy import LocalCopy, chain_to
from agentrl.weights.merged import MERGED, merged_model

if TYPE_CHECKING:
    from agentrl.store.client import Store

log = logging.getLogger(__name__)

_KEPT = 4
"""Adapters of a run that stay loaded: a sampler names the one that it read a few seconds ago."""
_LEAVE_SECONDS = 10.0


class ServedAdapters:
    """The adapters of one run in one engine, whose whole weights are version ``whole``."""

    def __init__(
        self,
        client: EngineControl,
        copy: LocalCopy,
        *,
        run_name: str,
        whole: int = 0,
        folder: str = "",
        why_merged: str | None = None,
        is_shared: bool = False,
    ) -> None:
        """``folder`` has the weights of ``whole``. ``why_merged`` says why the engine loads no adapters.

        A shared engine belongs to another process: it gets adapters only.
        """
        self.name: str | None = None
        """The adapter that requests must name; None while the engine serves whole weights."""
        self.whole: int | None = whole
        """None if the engine has lost its weights."""
        self._client = client
        self._copy = copy
        self._folders = {whole: folder}
        self._run_name = run_name
        self._why_merged = why_merged
        self._is_shared = is_shared
        self._loaded: list[str] = []
        self._merged: Path | None = None
        self._unloading: set[asyncio.Task[None]] = set()

    def pauses(self, version: PolicyVersion) -> bool:
        """Return whether the engine must be paused while ``version`` is loaded: its whole weights change."""
        is_adapter = version.encoding == "adapter" and self._why_merged is None
        return not is_adapter or version.base != self.whole

    def check(self, version: PolicyVersion) -> None:
        """Raise PublishError for whole weights that a shared engine would have to load."""
        if self._is_shared and self.pauses(version):
            raise PublishError(
                "it has other whole weights than the engine, which other runs may use",
                hint="train an adapter of the engine's model (--lora_rank), or serve this run without"
                " --engine_url",
            )

    async def fetch(self, store: Store, version: PolicyVersion) -> None:
        """Merge ``version``, which is in the copy, if the engine needs that. Raises ModelError."""
        if version.encoding != "adapter" or self._why_merged is None:
            return
        if self._merged is None:
            log.info("adapters are merged into whole weights for this engine: %s", self._why_merged)
        base = (await chain_to(store, version))[0]
        try:
            folder = Path((await self._copy.hold(store, version))[1])
            model = self._folders.get(base.id) or base.location
            merged = await merged_model(folder, model, MERGED / self._run_name)
        finally:
            self._copy.release()
        if self._merged not in (None, merged):
            await asyncio.to_thread(shutil.rmtree, self._merged, ignore_errors=True)
        self._merged = merged

    async def load(self, store: Store, version: PolicyVersion) -> None:
        """Load the adapter ``version``, and before it its base if the engine has another one.

        Running requests keep the adapter that they began with. Raises EngineError.
        """
        if self._merged is not None:
            await self._client.update_weights(str(self._merged), version.id)
            self.whole = version.id
            return
        base = (await chain_to(store, version))[0]
        name = adapter_name(self._run_name, version.id)
        try:
            if base.id != self.whole:
                self.name = None
                folder = self._folders.get(base.id) or (await self._copy.hold(store, base))[1]
                await self._client.update_weights(folder, base.id)
                self.whole = base.id
            loaded = await self._client.load_adapter(name, (await self._copy.hold(store, version))[1])
        finally:
            self._copy.release()
        self.name = name
        self._loaded = [*(each for each in self._loaded if each != name), name][-_KEPT:]
        for each in loaded - set(self._loaded):
            if each.rpartition("@")[0] == self._run_name:
                task = asyncio.create_task(self._unload(each))  # SGLang waits for the adapter's requests
                self._unloading.add(task)
                task.add_done_callback(self._unloading.discard)

    async def leave(self) -> None:
        """Unload this run's adapters from a shared engine; another engine ends with this process."""
        if self._is_shared:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await asyncio.gather(*map(self._unload, self._loaded))

    async def _unload(self, name: str) -> None:
        with contextlib.suppress(EngineError):
            await self._client.unload_adapter(name)
