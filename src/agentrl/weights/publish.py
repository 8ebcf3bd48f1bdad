"""A set of weights becomes a policy version: first the folder, then the document, never the other way."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.documents.policy import PolicyVersion
from agentrl.errors import PublishError
from agentrl.weights.folder import SavableModel, prune_versions, write_version
from agentrl.weights.manifest import checksums

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

LIVE_ENGINE_SECONDS = 60.0
"""An engine heard from within this time keeps the weights that it reports on disk."""


async def publish(
    store: Store,
    model: SavableModel,
    *,
    tokenizer_files_from: Path,
    folder_root: Path,
    version: int,
    step: int,
    train_step_id: str | None,
    keep: int,
    chat_template: str | None = None,
) -> PolicyVersion:
    """Write ``folder_root/v00000N``, insert its PolicyVersion, delete folders beyond the newest ``keep``.

    A folder of that name without a document (its writer was killed in between) is replaced. Raises
    PublishError when the weights cannot be written: nothing is published then, and it may be tried again.
    """
    if await store.policies.get(version) is not None:
        raise PublishError(
            f"policy version {version} of run {store.run_name} exists already",
            cure="another trainer works on this run: stop it, or give this one another --run_name",
        )
    folder, files = await asyncio.to_thread(
        write_version, model, tokenizer_files_from, folder_root, version, chat_template
    )
    document = PolicyVersion(
        id=version, step=step, location=str(folder), files=files, train_step=train_step_id
    )
    await store.policies.publish(document)
    await _prune(store, folder_root, keep)
    return document


async def publish_base(store: Store, folder: Path) -> PolicyVersion:
    """Publish the model folder that the run starts from, as it lies, as version 0; idempotent."""
    known = await store.policies.get(0)
    if known is not None:
        return known
    document = await asyncio.to_thread(_describe_base, folder)
    await store.policies.publish(document)
    return document


async def next_version(store: Store) -> int:
    """One more than any version that was ever published, withdrawn ones included."""
    return max((policy.id for policy in await store.policies.all()), default=-1) + 1


def _describe_base(folder: Path) -> PolicyVersion:
    files = checksums(folder)
    return PolicyVersion(id=0, step=0, location=str(folder.resolve()), files=files, train_step=None)


async def _prune(store: Store, folder_root: Path, keep: int) -> None:
    live = await store.services.live(LIVE_ENGINE_SECONDS)
    in_use = {service.policy_version for service in live if service.policy_version is not None}
    deleted = await asyncio.to_thread(prune_versions, folder_root, keep=keep, in_use=in_use)
    if deleted:
        logger.debug("deleted the folders of versions %s", deleted)
