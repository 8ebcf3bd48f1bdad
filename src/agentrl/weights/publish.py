"""Publish weights as a policy version: reserve its number, place its folder, publish its document."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.atomic_folder import discard_folder
from agentrl.documents.base import now
from agentrl.documents.run import FileChecksum, PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.errors import PublishError
from agentrl.weights.manifest import checksums, verify
from agentrl.weights.model_folder import SavableModel
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
"""The weights that an engine reports stay on disk while its last heartbeat is younger than this."""


@dataclass(frozen=True, kw_only=True)
class PublishTarget:
    """Where a trainer publishes its versions, and which ones stay on disk."""

    root: Path
    attempt: int
    """Fencing token of the trainer's lease: the store refuses writes once another trainer has taken over."""
    keep: int
    """How many of the newest versions stay."""
    keep_every: int = 0
    """Versions whose number is a multiple of this stay permanently; 0: none."""


async def publish(
    store: Store,
    model: SavableModel,
    target: PublishTarget,
    *,
    tokenizer_files_from: Path,
    step: int,
    train_step_id: str | None,
    chat_template: str | None = None,
    written: Path | None = None,
) -> PolicyVersion:
    """Publish the weights of ``step`` as folder ``root/v00000N`` and as a PolicyVersion; prune old folders.

    N is one more than any earlier version, including withdrawn ones. If the files equal those of a version
    that was withdrawn for the same step, that version is reinstated instead, so that tokens sampled with it
    keep their age. ``written`` is a folder that holds these weights already: they are linked, not written.

    The number and the folder are reserved in the database before the folder appears, so that two trainers
    never write the same folder. Raises LeaseLostError if another trainer has taken over, and PublishError if
    the weights cannot be written; nothing is published then, and the call can be retried.
    """
    number, reserved = await _number(store)
    temporary, files = await asyncio.to_thread(
        write_temporary,
        model,
        tokenizer_files_from,
        version_folder(target.root, number),
        chat_template,
        written,
    )
    try:
        twin = withdrawn_twin(await store.policy_versions.withdrawn(step), files)
        if twin is not None:
            document = await _reinstate(store, twin, target, temporary, train_step_id)
        else:
            document = PolicyVersion(
                id=number, step=step, location=_location(target, number, reserved), files=files,
                train_step=train_step_id, attempt=target.attempt,
            )  # fmt: skip
            await store.policy_versions.reserve(document, attempt=target.attempt)
            await asyncio.to_thread(place_version, temporary, Path(document.location), number, files)
            document = replace(document, published_at=now())
            await store.policy_versions.publish(document, attempt=target.attempt)
    finally:
        await asyncio.to_thread(discard_folder, temporary)
    await _prune(store, target)
    return document


async def _number(store: Store) -> tuple[int, PolicyVersion | None]:
    """Return the number of the next version, and the reservation that an earlier call left for it."""
    reserved = await store.policy_versions.reserved()
    if reserved is not None:
        return reserved.id, reserved
    newest = await store.policy_versions.newest_id()
    return 0 if newest is None else newest + 1, None


def _location(target: PublishTarget, number: int, reserved: PolicyVersion | None) -> str:
    if reserved is not None and reserved.attempt == target.attempt:
        return reserved.location
    folder = free_folder(target.root, number, target.attempt, is_contested=reserved is not None)
    return str(folder.resolve())


def withdrawn_twin(withdrawn: Sequence[PolicyVersion], files: Sequence[FileChecksum]) -> PolicyVersion | None:
    """Return the first of the ``withdrawn`` versions that has the same ``files``."""
    wanted = sorted(files, key=_name)
    return next((policy for policy in withdrawn if sorted(policy.files, key=_name) == wanted), None)


async def _reinstate(
    store: Store, earlier: PolicyVersion, target: PublishTarget, temporary: Path, train_step_id: str | None
) -> PolicyVersion:
    """Publish ``earlier`` again; replace its folder by ``temporary`` if it was pruned or damaged."""
    location = await asyncio.to_thread(_settle_folder, earlier, target, temporary)
    await store.policy_versions.reinstate(
        earlier.id, train_step=train_step_id, location=location, attempt=target.attempt
    )
    logger.info("version %d is reinstated: the replayed step %d has its weights", earlier.id, earlier.step)
    return replace(
        earlier, status=VersionStatus.PUBLISHED, train_step=train_step_id, location=location, pruned_at=None
    )


def _settle_folder(earlier: PolicyVersion, target: PublishTarget, temporary: Path) -> str:
    if earlier.pruned_at is None:
        with contextlib.suppress(PublishError):
            verify(earlier.location, earlier.files)
            return earlier.location
    own = version_folder(target.root, earlier.id, target.attempt)
    return place_version(temporary, own, earlier.id, earlier.files)


def _name(file: FileChecksum) -> str:
    return file.name


async def publish_base(store: Store, folder: Path, attempt: int | None = None) -> PolicyVersion:
    """Publish the model folder that the run starts from as version 0, in place; idempotent."""
    known = await store.policy_versions.get(0)
    if known is not None:
        return known
    document = await asyncio.to_thread(_describe_base, folder)
    await store.policy_versions.publish(document, attempt=attempt)
    return document


def _describe_base(folder: Path) -> PolicyVersion:
    files = checksums(folder)
    return PolicyVersion(id=0, step=0, location=str(folder.resolve()), files=files, train_step=None)


async def _prune(store: Store, target: PublishTarget) -> None:
    """Delete the folders that are no longer needed, after marking their versions as pruned."""
    folders = await asyncio.to_thread(version_folders, target.root)
    known = await store.policy_versions.by_ids(sorted(set(folders.values())))
    newest = await store.policy_versions.newest_id()
    live = await store.services.live(LIVE_ENGINE_SECONDS)
    in_use = {service.policy_version for service in live if service.policy_version is not None}
    in_use.update(policy.id for policy in await store.policy_versions.published(target.keep))
    in_use.update(policy.id for policy in known if _is_permanent(policy, target.keep_every))
    in_use |= await store.evaluations.needed_versions()
    kept = kept_versions(folders.values(), in_use, keep=target.keep)
    deleted, pruned = surplus_folders(folders, known, kept, -1 if newest is None else newest)
    if deleted:
        await store.policy_versions.mark_pruned(pruned, attempt=target.attempt)
        await asyncio.to_thread(delete_folders, target.root, deleted)
        logger.debug("deleted %s", deleted)


def _is_permanent(policy: PolicyVersion, every: int) -> bool:
    return every > 0 and policy.id % every == 0 and policy.status is VersionStatus.PUBLISHED
