"""Follow the published policy versions: the newest intact one at start, then each newer one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from agentrl.documents.run import PolicyVersion
from agentrl.errors import PublishError
from agentrl.weights.manifest import verify

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

_PAGE = 8


async def newest_intact_version(store: Store) -> PolicyVersion | None:
    """Return the newest published version whose files match their checksums; None if none is published.

    Raises PublishError if versions are published and none of them is intact.
    """
    refused: PublishError | None = None
    async for version in _published(store):
        try:
            await asyncio.to_thread(verify, version.location, version.files)
        except PublishError as error:
            logger.error("version %d refused: %s", version.id, error.message)
            refused = refused or error
        else:
            return version
    if refused is not None:
        raise refused
    return None


async def newer_versions(store: Store, after: int, poll_seconds: float) -> AsyncIterator[PolicyVersion]:
    """Yield the newest published version whenever it is newer than ``after`` and than the last one yielded.

    Versions that are superseded before they can be yielded are skipped. The iteration never ends by itself.
    """
    reached = after
    while True:
        newest = await store.policy_versions.latest()
        if newest is not None and newest.id > reached:
            reached = newest.id
            yield newest
        else:
            await store.wait_for_change("PolicyVersion", timeout=poll_seconds)


async def _published(store: Store) -> AsyncIterator[PolicyVersion]:
    """Yield every published version, newest first; read them a page at a time."""
    below: int | None = None
    while page := await store.policy_versions.published(_PAGE, below=below):
        for version in page:
            yield version
        below = page[-1].id
