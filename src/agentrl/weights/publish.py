"""A set of weights becomes a policy version: it is reserved, its folder appears, then it is published."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.documents.base import now
from agentrl.documents.policy import FileChecksum, PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.errors import PublishError
from agentrl.weights.folder import SavableModel, discard_folder
from agentrl.weights.links import share_files
from agentrl.weights.manifest import checksums, verify
from agentrl.weights.versions import (
    delete_folders,
    free_folder,
    kept_versions,
    place_version,
    surplus_folders,
    version_folder,
    version_folders,
    write_temporary,
)

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

LIVE_ENGINE_SECONDS = 60.0
"""An engine heard from within this time keeps the weights that it reports on disk."""


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """Where a trainer publishes, and what it keeps there."""

    root: Path
    attempt: int
    """The trainer's lease: nothing is published or deleted once another trainer has taken over."""
    keep: int
    """The newest versions that stay."""
    keep_every: int = 0
    """Each version whose number this divides stays for ever; 0: none."""


async def publish(
    store: Store,
    model: SavableModel,
    shelf: Shelf,
    *,
    tokenizer_files_from: Path,
    step: int,
    train_step_id: str | None,
    chat_template: str | None = None,
    same_as: Path | None = None,
) -> PolicyVersion:
    """Publish the weights of ``step`` as ``root/v00000N`` and its PolicyVersion; prune older folders.

    N is one more than any version before it, withdrawn ones included. Weights that equal, file by file, those
    of a version that was withdrawn for the same step are that version again: it is re-instated, and the
    tokens that were sampled with it keep the age they have. Files that equal those in the folder ``same_as``
    share their space on disk.

    The number and the folder are reserved in the database before the folder appears, so that two trainers
    never write one. Raises LeaseLostError when another trainer has taken over, and PublishError when the
    weights cannot be written: nothing is published then, and it may be tried again.
    """
    number, reserved = await _number(store)
    temporary, files = await asyncio.to_thread(
        write_temporary, model, tokenizer_files_from, version_folder(shelf.root, number), chat_template
    )
    try:
        if same_as is not None:
            await asyncio.to_thread(share_files, temporary, same_as)
        twin = withdrawn_twin(await store.policies.withdrawn(step), files)
        if twin is not None:
            document = await _reinstate(store, twin, shelf, temporary, train_step_id)
        else:
            document = PolicyVersion(
                id=number, step=step, location=_location(shelf, number, reserved), files=files,
                train_step=train_step_id, attempt=shelf.attempt,
            )  # fmt: skip
            await store.policies.reserve(document, attempt=shelf.attempt)
            await asyncio.to_thread(place_version, temporary, Path(document.location), number, files)
            document = replace(document, published_at=now())
            await store.policies.publish(document, attempt=shelf.attempt)
    finally:
        await asyncio.to_thread(discard_folder, temporary)
    await _prune(store, shelf)
    return document


async def _number(store: Store) -> tuple[int, PolicyVersion | None]:
    """The number of the next version, and the reservation that a trainer left for it."""
    reserved = await store.policies.reserved()
    if reserved is not None:
        return reserved.id, reserved
    newest = await store.policies.newest_id()
    return 0 if newest is None else newest + 1, None


def _location(shelf: Shelf, number: int, reserved: PolicyVersion | None) -> str:
    if reserved is not None and reserved.attempt == shelf.attempt:
        return reserved.location
    folder = free_folder(shelf.root, number, shelf.attempt, is_contested=reserved is not None)
    return str(folder.resolve())


def withdrawn_twin(withdrawn: Sequence[PolicyVersion], files: Sequence[FileChecksum]) -> PolicyVersion | None:
    """The first version of ``withdrawn`` that holds the same ``files``."""
    wanted = sorted(files, key=_name)
    return next((policy for policy in withdrawn if sorted(policy.files, key=_name) == wanted), None)


async def _reinstate(
    store: Store, earlier: PolicyVersion, shelf: Shelf, temporary: Path, train_step_id: str | None
) -> PolicyVersion:
    """Publish ``earlier`` again. If its folder was pruned or damaged, it gets the one just written."""
    location = await asyncio.to_thread(_settle_folder, earlier, shelf, temporary)
    await store.policies.reinstate(
        earlier.id, train_step=train_step_id, location=location, attempt=shelf.attempt
    )
    logger.info("version %d is re-instated: the replayed step %d has its weights", earlier.id, earlier.step)
    return replace(
        earlier, status=VersionStatus.PUBLISHED, train_step=train_step_id, location=location, pruned_at=None
    )


def _settle_folder(earlier: PolicyVersion, shelf: Shelf, temporary: Path) -> str:
    if earlier.pruned_at is None:
        with contextlib.suppress(PublishError):
            verify(earlier.location, earlier.files)
            return earlier.location
    own = version_folder(shelf.root, earlier.id, shelf.attempt)
    return place_version(temporary, own, earlier.id, earlier.files)


def _name(file: FileChecksum) -> str:
    return file.name


async def publish_base(store: Store, folder: Path, attempt: int | None = None) -> PolicyVersion:
    """Publish the model folder that the run starts from, as it lies, as version 0; idempotent."""
    known = await store.policies.get(0)
    if known is not None:
        return known
    document = await asyncio.to_thread(_describe_base, folder)
    await store.policies.publish(document, attempt=attempt)
    return document


def _describe_base(folder: Path) -> PolicyVersion:
    files = checksums(folder)
    return PolicyVersion(id=0, step=0, location=str(folder.resolve()), files=files, train_step=None)


async def _prune(store: Store, shelf: Shelf) -> None:
    """Delete the folders that nobody needs; before each is deleted, the database says that it is given up."""
    folders = await asyncio.to_thread(version_folders, shelf.root)
    known = await store.policies.of(sorted(set(folders.values())))
    newest = await store.policies.newest_id()
    live = await store.services.live(LIVE_ENGINE_SECONDS)
    in_use = {service.policy_version for service in live if service.policy_version is not None}
    in_use.update(policy.id for policy in await store.policies.published(shelf.keep))
    in_use.update(policy.id for policy in known if _is_kept_for_ever(policy, shelf.keep_every))
    kept = kept_versions(folders.values(), in_use, keep=shelf.keep)
    deleted, pruned = surplus_folders(folders, known, kept, -1 if newest is None else newest)
    if deleted:
        await store.policies.mark_pruned(pruned, attempt=shelf.attempt)
        await asyncio.to_thread(delete_folders, shelf.root, deleted)
        logger.debug("deleted %s", deleted)


def _is_kept_for_ever(policy: PolicyVersion, every: int) -> bool:
    return every > 0 and policy.id % every == 0 and policy.status is VersionStatus.PUBLISHED
