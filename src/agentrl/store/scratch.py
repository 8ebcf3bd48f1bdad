"""Open a database that exists only for the length of a block."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from pymongo.errors import PyMongoError

from agentrl.config.schema import RunConfig
from agentrl.store.client import Store, open_store

logger = logging.getLogger(__name__)


@asynccontextmanager
async def scratch_store(run: RunConfig, prefix: str) -> AsyncIterator[Store]:
    """Open the store of a new database on the server of ``run``, and drop it at the end.

    Its name is ``prefix`` and 12 random digits; a process that is killed leaves it. Raises the StoreErrors of
    ``open_store``.
    """
    name = f"{prefix}_{secrets.token_hex(6)}"
    async with await open_store(replace(run, run_name=name)) as store:
        try:
            yield store
        finally:
            try:
                await store.connection.client.drop_database(name)
            except PyMongoError as error:
                logger.warning("database %s is left, and may be dropped by hand: %s", name, error)
