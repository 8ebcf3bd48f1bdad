"""Stop the database calls of a process whose run is renamed or deleted while it works."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from pymongo.asynchronous.database import AsyncDatabase

from agentrl.documents.run import SCHEMA
from agentrl.errors import RunMissingError
from agentrl.store.names import RUN

_LOOK_SECONDS: Final = 0.5
SETTLE_SECONDS: Final = 2 * _LOOK_SECONDS
"""How long after the mark every process that works on the run has seen it. Only then is its database copied
or dropped: MongoDB would make a dropped one anew, without schema, for the next document of such a process."""


class RunFence:
    """Looks every half second, before a call, whether the run is there and not marked.

    A process that was stopped for a while looks before its first call.
    """

    def __init__(self, database: AsyncDatabase[dict[str, Any]]) -> None:
        self._database = database
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def check(self) -> None:
        """Raise RunMissingError if the run is being renamed or deleted, or is gone."""
        if self._is_fresh():
            return
        async with self._looking:
            if self._is_fresh():
                return
            began = time.monotonic()
            schema = await self._database[RUN].find_one({"_id": SCHEMA})
            if schema is None or schema.get("renaming") or schema.get("deleting"):
                raise RunMissingError(
                    f"run {self._database.name!r} has been renamed or deleted, or is about to be",
                    hint="agentrl runs lists the runs; restart this process with the run's new name",
                )
            self._looked_at = began

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._looked_at < _LOOK_SECONDS
