"""Bring a published version to one engine: fetch it while the engine generates, then load it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.schema import ModelConfig
from agentrl.documents.run import PolicyVersion
from agentrl.errors import ConfigError, EngineError, PublishError
from agentrl.inference.control import EngineControl
from agentrl.inference.engine import adapter_name

if TYPE_CHECKING:
    from agentrl.store.client import Store

log = logging.getLogger(__name__)

_KEPT_ADAPTERS = 4
"""Adapters of a run that stay loaded: a sampler names the one that it read a few seconds ago."""
_LEAVE_SECONDS = 10.0
_MERGED = Path(".agentrl/merged")


class ServedWeights:
    """The weights of one engine: whole ones, for which it is paused, or a base and adapters of it."""

    def __init__(
        self,
        client: EngineControl,
        store: Store,
        *,
        run_name: str,
        loaded: int = 0,
        why_merged: str | None = None,
        is_shared: bool = False,
    ) -> None:
        """``loaded`` is the version of the engine's whole weights; ``why_merged`` why it loads no adapters.

        A shared engine belongs to another process: it gets adapters only.
        """
        self.adapter: str | None = None
        """The name that requests must give; None while the engine serves whole weights."""
        self._client = client
        self._store = store
        self._run_name = run_name
        self._whole = loaded
        self._why_merged = why_merged
        self._is_shared = is_shared
        self._adapters: list[str] = []
        self._merged: Path | None = None
        self._unloading: set[asyncio.Task[None]] = set()

    async def fetch(self, version: PolicyVersion) -> None:
        """Make ``version`` ready to be loaded. Raises PublishError if it is damaged or does not fit."""
        from agentrl.weights.merged import merged_model
        from agentrl.weights.model_folder import verify

        await asyncio.to_thread(verify, version.location, version.files)
        if self._is_shared and self.pauses(version):
            raise PublishError(
                f"version {version.id} has other whole weights than the engine, which other runs may use",
                hint="train an adapter of the engine's model (--lora_rank), or serve this run without"
                " --engine_url",
            )
        if version.encoding == "adapter" and self._why_merged is not None:
            if self._merged is None:
                log.info("adapters are merged into whole weights for this engine: %s", self._why_merged)
            base = (await self._store.policy_versions.whole(version)).location
            root = _MERGED / self._run_name
            previous, self._merged = self._merged, await merged_model(Path(version.location), base, root)
            if previous not in (None, self._merged):
                await asyncio.to_thread(shutil.rmtree, previous, ignore_errors=True)

    def pauses(self, version: PolicyVersion) -> bool:
        """Return whether the engine must be paused while ``version`` is loaded: its whole weights change."""
        is_adapter = version.encoding == "adapter" and self._why_merged is None
        return not is_adapter or version.base != self._whole

    async def load(self, version: PolicyVersion) -> None:
        """Load ``version``, which was fetched. Raises EngineError; the engine then keeps its weights.

        Running requests keep the adapter that they began with.
        """
        if version.encoding != "adapter":
            await self._client.update_weights(version.location, version.id)
            self._whole, self.adapter = version.id, None
        elif self._merged is not None:
            await self._client.update_weights(str(self._merged), version.id)
            self._whole, self.adapter = version.id, None
        else:
            base = await self._store.policy_versions.whole(version)
            if base.id != self._whole:
                await self._client.update_weights(base.location, base.id)
                self._whole, self.adapter = base.id, None
            await self._load_adapter(adapter_name(self._run_name, version.id), version.location)

    async def _load_adapter(self, name: str, folder: str) -> None:
        loaded = await self._client.load_adapter(name, folder)
        self.adapter = name
        self._adapters = [*(each for each in self._adapters if each != name), name][-_KEPT_ADAPTERS:]
        # An engine may wait with an unloading for the requests of the adapter.
        for each in loaded - set(self._adapters):
            if each.rpartition("@")[0] == self._run_name:
                task = asyncio.create_task(self._unload(each))
                self._unloading.add(task)
                task.add_done_callback(self._unloading.discard)

    async def leave(self) -> None:
        """Unload this run's adapters from a shared engine; another engine ends with this process."""
        if self._is_shared:
            with contextlib.suppress(TimeoutError):  # an engine may wait for their requests
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await asyncio.gather(*map(self._unload, self._adapters))

    async def _unload(self, name: str) -> None:
        with contextlib.suppress(EngineError):
            await self._client.unload_adapter(name)


async def starting_weights(store: Store, model: ModelConfig) -> tuple[int, str, PolicyVersion | None]:
    """Return the number and the folder of the newest intact version; else 0 and ``--model_name_or_path``.

    For an adapter these are those of its base, and the adapter's version is the third value. Raises
    PublishError if versions are published and none of them is intact.
    """
    from agentrl.weights.publish import newest_intact_version

    version = await newest_intact_version(store)
    if version is not None:
        whole = await store.policy_versions.whole(version)
        return whole.id, whole.location, version if version.encoding == "adapter" else None
    if model.model_name_or_path is None:
        raise ConfigError(
            "there is no published version to serve, and no model to start from",
            hint="pass --model_name_or_path",
        )
    return 0, str(Path.cwd() / model.model_name_or_path), None
