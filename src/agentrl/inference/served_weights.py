"""Bring a published version to one engine: fetch it while the engine generates, then load it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.schema import ModelConfig
from agentrl.documents.run import PolicyVersion
from agentrl.errors import ConfigError
from agentrl.inference.control import EngineControl

if TYPE_CHECKING:
    from agentrl.store.client import Store


class ServedWeights:
    """The weights of one engine. The engine is paused for ``load`` alone."""

    def __init__(self, client: EngineControl) -> None:
        self._client = client

    async def fetch(self, version: PolicyVersion) -> None:
        """Make ``version`` ready to be loaded. Raises PublishError if it is damaged."""
        from agentrl.weights.model_folder import verify

        await asyncio.to_thread(verify, version.location, version.files)

    async def load(self, version: PolicyVersion) -> None:
        """Load ``version``, which was fetched. Raises EngineError; the engine then keeps its weights."""
        await self._client.update_weights(version.location, version.id)


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
