"""A set of weights becomes a policy version: first the folder, then the document, never the other way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.documents.policy import FileChecksum, PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.errors import PublishError
from agentrl.weights.folder import (
    SavableModel,
    prune_versions,
    remove_version,
    rename_version,
    write_version,
)
from agentrl.weights.manifest import checksums, verify

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
    step: int,
    train_step_id: str | None,
    keep: int,
    chat_template: str | None = None,
) -> PolicyVersion:
    """Publish the weights of ``step``: write ``folder_root/v00000N``, then its PolicyVersion; prune folders.

    N is one more than any version before it, withdrawn ones included. Weights that equal, file by file, those
    of a version that was withdrawn for the same step are that version again: it is re-instated, and the
    tokens that were sampled with it keep the age they have. Folders beyond the newest ``keep`` are deleted.

    A folder without a document (its writer was killed in between) is replaced. Raises PublishError when the
    weights cannot be written: nothing is published then, and it may be tried again.
    """
    newest = await store.policies.newest_id()
    version = 0 if newest is None else newest + 1
    folder, files = await asyncio.to_thread(
        write_version, model, tokenizer_files_from, folder_root, version, chat_template
    )
    earlier = withdrawn_twin(await store.policies.withdrawn(step), files)
    if earlier is None:
        document = PolicyVersion(
            id=version, step=step, location=str(folder), files=files, train_step=train_step_id
        )
        await store.policies.publish(document)
    else:
        document = await _reinstate(store, earlier, folder_root, version, train_step_id)
    await _prune(store, folder_root, keep)
    return document


def withdrawn_twin(withdrawn: Sequence[PolicyVersion], files: Sequence[FileChecksum]) -> PolicyVersion | None:
    """The first version of ``withdrawn`` that holds the same ``files``."""
    wanted = sorted(files, key=_name)
    return next((policy for policy in withdrawn if sorted(policy.files, key=_name) == wanted), None)


async def _reinstate(
    store: Store, earlier: PolicyVersion, root: Path, written: int, train_step_id: str | None
) -> PolicyVersion:
    """Publish ``earlier`` again; its folder, where it has been pruned or harmed, is the one just written."""
    location = await asyncio.to_thread(_settle_folder, earlier, root, written)
    await store.policies.reinstate(earlier.id, train_step=train_step_id, location=location)
    logger.info("version %d is re-instated: the replayed step %d has its weights", earlier.id, earlier.step)
    return replace(earlier, status=VersionStatus.PUBLISHED, train_step=train_step_id, location=location)


def _settle_folder(earlier: PolicyVersion, root: Path, written: int) -> str:
    try:
        verify(earlier.location, earlier.files)
    except PublishError:
        return str(rename_version(root, written, earlier.id))
    remove_version(root, written)
    return earlier.location


def _name(file: FileChecksum) -> str:
    return file.name


async def publish_base(store: Store, folder: Path) -> PolicyVersion:
    """Publish the model folder that the run starts from, as it lies, as version 0; idempotent."""
    known = await store.policies.get(0)
    if known is not None:
        return known
    document = await asyncio.to_thread(_describe_base, folder)
    await store.policies.publish(document)
    return document


def _describe_base(folder: Path) -> PolicyVersion:
    files = checksums(folder)
    return PolicyVersion(id=0, step=0, location=str(folder.resolve()), files=files, train_step=None)


async def _prune(store: Store, folder_root: Path, keep: int) -> None:
    live = await store.services.live(LIVE_ENGINE_SECONDS)
    in_use = {service.policy_version for service in live if service.policy_version is not None}
    in_use.update(policy.id for policy in await store.policies.published(keep))
    deleted = await asyncio.to_thread(prune_versions, folder_root, keep=keep, in_use=in_use)
    if deleted:
        logger.debug("deleted the folders of versions %s", deleted)
