"""Bring a published version to one engine: fetch it while the engine generates, then load it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.schema import ModelConfig
from agentrl.documents.run import PolicyVersion
from agentrl.errors import ConfigError, EngineError, PublishError
from agentrl.inference.control import EngineControl
from agentrl.inference.live_weights import LiveLoader, PartlyLoadedError, is_reachable
from agentrl.weights.model_folder import verify

if TYPE_CHECKING:
    from agentrl.store.client import Store


log = logging.getLogger(__name__)


class ServedWeights:
    """The weights of one engine. The engine is paused for ``load`` alone."""

    def __init__(self, client: EngineControl, store: Store) -> None:
        self._client = client
        self._store = store
        self._live = LiveLoader(client)

    async def fetch(self, version: PolicyVersion) -> None:
        """Make ``version`` ready to be loaded. Raises PublishError if it is damaged, or out of reach."""
        if self._is_live(version):
            return  # it comes from the trainer's memory when it is loaded
        if not version.is_stored:
            raise PublishError(
                "it is only in the memory of a trainer that this engine does not reach; the next stored"
                " version is loaded"
            )
        await asyncio.to_thread(verify, version.location, version.files)

    async def load(self, version: PolicyVersion) -> int:
        """Load ``version``, which was fetched; return the number of the version that is served then.

        It is an older one after a failure that left the engine with a part of ``version``. Raises
        PublishError or EngineError; the engine then keeps its weights, unless it is a PartlyLoadedError.
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
                await asyncio.to_thread(verify, version.location, version.files)
            else:
                return version.id
        await self._client.update_weights(version.location, version.id)
        return version.id

    def _is_live(self, version: PolicyVersion) -> bool:
        """Return whether ``version`` may come from the trainer's memory."""
        return version.live is not None and self._client.takes_live_weights and is_reachable(version.live)

    async def _restore(self, error: PartlyLoadedError) -> int:
        """Load the newest stored version in place of a mixture; raise ``error`` if that fails too."""
        from agentrl.weights.publish import newest_intact_version

        try:
            stored = await newest_intact_version(self._store)
            if stored is None:
                raise error
            await self._client.update_weights(stored.location, stored.id)
        except (PublishError, EngineError) as failure:
            raise error from failure
        return stored.id


async def starting_weights(store: Store, model: ModelConfig) -> tuple[int, str]:
    """Return the number and the folder of the newest intact version; else 0 and ``--model_name_or_path``.

    Raises PublishError if versions are published and none of them is intact.
    """
    from agentrl.weights.publish import newest_intact_version

    version = await newest_intact_version(store)
    if version is not None:
        return version.id, version.location
    if model.model_name_or_path is None:
        raise ConfigError(
            "there is no published version to serve, and no model to start from",
            hint="pass --model_name_or_path",
        )
    return 0, str(Path.cwd() / model.model_name_or_path)
