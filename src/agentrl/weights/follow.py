"""The newest policy version, as it is published."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from agentrl.documents.policy import PolicyVersion

if TYPE_CHECKING:
    from agentrl.store.client import Store


async def versions(store: Store, after: int, poll_seconds: float) -> AsyncIterator[PolicyVersion]:
    """Yield the newest published version whenever it is above ``after`` and above what was yielded before.

    Versions that were superseded before they could be yielded are skipped. Ends only with its consumer.
    """
    reached = after
    while True:
        newest = await store.policies.latest()
        if newest is not None and newest.id > reached:
            reached = newest.id
            yield newest
        else:
            await store.wait_for_change("PolicyVersion", timeout=poll_seconds)
