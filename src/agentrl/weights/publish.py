"""Publish weights as policy versions, prune their folders, and follow the versions that are published."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base.atomic_folder import discard_folder, finish_folder
from agentrl.documents.document import now
from agentrl.documents.run import FileChecksum, LiveWeights, PolicyVersion, WeightEncoding
from agentrl.documents.status import VersionStatus
from agentrl.errors import PublishError
from agentrl.weights import storage
from agentrl.weights.delta import SUFFIX
from agentrl.weights.folder import (
    ADAPTER_WEIGHTS,
    explain_write_errors,
    known_checksums,
    verify,
    write_manifest,
)
from agentrl.weights.local_copy import chain_to

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.weights.snapshot import Written

logger = logging.getLogger(__name__)


LIVE_ENGINE_SECONDS = 60.0
"""The weights that an engine reports stay on disk while its last heartbeat is younger than this."""
_FOLDER = re.compile(r"v(\d+)(-\d+)?")
_PAGE = 8
_WEIGHTS = (".safetensors", ".index.json", SUFFIX)


@dataclass(frozen=True, kw_only=True)
class PublishTarget:
    """Where a trainer publishes its versions, and which ones stay on disk."""

    root: str
    """Location of the versions: a folder's absolute path, or a URL (``agentrl.weights.storage``)."""
    attempt: int
    """Fencing token of the trainer's lease: the store refuses writes once another trainer has taken over."""
    keep: int
    """How many of the newest versions stay."""
    keep_every: int = 0
    """Versions whose number is a multiple of this stay permanently; 0: none."""
    keeps_sampled: bool = False
    """Whether versions stay while a group of training that is not finalized has tokens of theirs."""


async def publish(
    store: Store,
    temporary: Path,
    written: Written,
    target: PublishTarget,
    *,
    step: int,
    train_step_id: str | None,
    base: int | None = None,
    live: LiveWeights | None = None,
) -> PolicyVersion:
    """Publish the weights of ``step`` in ``temporary`` as a PolicyVersion and as folder ``root/v00000N``.

    N is one more than any earlier version, including withdrawn ones. If a version with the same weights was
    withdrawn for the same step, that version is reinstated instead, so that tokens sampled with it keep their
    age. ``base`` is the version from which ``written`` differs, or that an adapter belongs to; None for whole
    weights. The trainer's memory has them too where ``live`` is given. Prunes old folders.

    The number and the folder are reserved in the database before the folder appears, so that two trainers
    never write the same folder. Raises LeaseLostError if another trainer has taken over, and PublishError if
    the folder cannot be renamed; nothing is published then. ``temporary`` is gone in any case.
    """
    try:
        twin = withdrawn_twin(await store.policy_versions.withdrawn(step), written)
        if twin is not None:
            again = replace(twin, train_step=train_step_id, live=live)
            document = await _reinstate(store, again, target, temporary, written, base)
        else:
            number, reserved = await _number(store)
            if reserved is not None and reserved.attempt == target.attempt and reserved.location:
                # Take the folder of this trainer's own failed try: no other trainer writes there.
                location = reserved.location
            else:
                names = await storage.folder_names(target.root)
                name = free_name(names, number, target.attempt, is_contested=reserved is not None)
                location = f"{target.root}/{name}"
            document = PolicyVersion(
                id=number, step=step, location=location, files=written.files,
                encoding=_encoding(written, base), base=base, digest=written.digest,
                live=live, train_step=train_step_id, attempt=target.attempt,
            )  # fmt: skip
            await store.policy_versions.reserve(document, attempt=target.attempt)
            await place_version(temporary, document.location, number, written)
            document = replace(document, published_at=now())
            await store.policy_versions.publish(document, attempt=target.attempt)
    finally:
        await asyncio.to_thread(discard_folder, temporary)
    await _prune(store, target)
    return document


async def publish_live(
    store: Store, live: LiveWeights, *, attempt: int | None, step: int, train_step_id: str | None
) -> PolicyVersion:
    """Publish the weights of ``step``, which are in the trainer's memory alone, as the next PolicyVersion.

    Raises LeaseLostError if another trainer has taken over.
    """
    number, _ = await _number(store)
    document = PolicyVersion(
        id=number, step=step, location="", files=(), live=live, train_step=train_step_id, attempt=attempt
    )
    await store.policy_versions.reserve(document, attempt=attempt)
    document = replace(document, published_at=now())
    await store.policy_versions.publish(document, attempt=attempt)
    return document


async def _number(store: Store) -> tuple[int, PolicyVersion | None]:
    """Return the number of the next version, and the reservation that an earlier call left for it."""
    reserved = await store.policy_versions.reserved()
    if reserved is not None:
        return reserved.id, reserved
    newest = await store.policy_versions.newest_id()
    return 0 if newest is None else newest + 1, None


def _encoding(written: Written, base: int | None) -> WeightEncoding:
    if base is None:
        return "full"
    return "adapter" if ADAPTER_WEIGHTS in written.places.values() else "delta"


def withdrawn_twin(withdrawn: Sequence[PolicyVersion], written: Written) -> PolicyVersion | None:
    """Return the first of the ``withdrawn`` versions that has the same weights, tokenizer and configuration.

    Its files may be others: of another number of ranks, or a delta, which has neither of the latter.
    """

    def beside(files: Sequence[FileChecksum]) -> set[FileChecksum]:
        return {file for file in files if not file.name.endswith(_WEIGHTS)}

    own = beside(written.files)
    same = (policy for policy in withdrawn if policy.digest == written.digest)
    return next((policy for policy in same if not own or beside(policy.files) in (own, set())), None)


async def _reinstate(
    store: Store,
    earlier: PolicyVersion,
    target: PublishTarget,
    temporary: Path,
    written: Written,
    base: int | None,
) -> PolicyVersion:
    """Publish ``earlier`` again, with its own folder if that is intact, else with ``temporary``."""
    again = replace(earlier, status=VersionStatus.PUBLISHED, pruned_at=None)
    if not await asyncio.to_thread(_is_whole, earlier):
        location = f"{target.root}/{version_name(earlier.id, target.attempt)}"
        await place_version(temporary, location, earlier.id, written)
        again = replace(
            again,
            location=location,
            files=written.files,
            encoding=_encoding(written, base),
            base=base,
        )
    await store.policy_versions.reinstate(again, attempt=target.attempt)
    logger.info("version %d is reinstated: the replayed step %d has its weights", earlier.id, earlier.step)
    return again


def _is_whole(version: PolicyVersion) -> bool:
    """Return whether the folder of ``version`` is intact and needs no other one."""
    if version.pruned_at is not None or version.encoding != "full":
        return False
    try:
        verify(version.location, version.files)
    except PublishError:
        return False
    return True


async def publish_base(store: Store, folder: Path, attempt: int | None = None) -> PolicyVersion:
    """Publish the model folder that the run starts from as version 0, in place; idempotent."""
    known = await store.policy_versions.get(0)
    if known is not None:
        return known
    files, resolved = await asyncio.to_thread(lambda: (known_checksums(folder), folder.resolve()))
    document = PolicyVersion(id=0, step=0, location=str(resolved), files=files, train_step=None)
    await store.policy_versions.publish(document, attempt=attempt)
    return document


async def lost_versions(store: Store, newest: PolicyVersion) -> list[int]:
    """Return ``newest`` and the versions that lead to it, from the first on whose files were deleted.

    Empty if all are there. Looks for the files alone, and not behind URLs; version 0 is the user's own model.
    """
    try:
        chain = await chain_to(store, newest)
    except PublishError:
        return [newest.id]

    def is_there(version: PolicyVersion) -> bool:
        if version.id == 0 or storage.is_remote(version.location):
            return True
        return all((Path(version.location) / file.name).is_file() for file in version.files)

    there = await asyncio.to_thread(lambda: [is_there(version) for version in chain])
    return [] if all(there) else [version.id for version in chain[there.index(False) :]]


async def _prune(store: Store, target: PublishTarget) -> None:
    """Delete the folders that are no longer needed, after marking their versions as pruned."""
    folders = version_folders(await _folder_names(store, target.root))
    known = await store.policy_versions.by_ids(sorted(set(folders.values())))
    newest = await store.policy_versions.newest_id()
    live = await store.services.live(LIVE_ENGINE_SECONDS)
    in_use = {service.policy_version for service in live if service.policy_version is not None}
    in_use.update(policy.id for policy in await store.policy_versions.published(target.keep))
    if target.keep_every > 0:
        in_use.update(
            policy.id
            for policy in known
            if policy.id % target.keep_every == 0 and policy.status is VersionStatus.PUBLISHED
        )
    in_use |= await store.evaluations.needed_versions()
    if target.keeps_sampled and (oldest := await store.groups.oldest_version("train")) is not None:
        in_use.update(version for version in folders.values() if version >= oldest)
    kept = with_bases(kept_versions(folders.values(), in_use, keep=target.keep), known)
    deleted, pruned = surplus_folders(folders, known, kept, -1 if newest is None else newest)
    if deleted:
        # Record it first: a folder that a kill then leaves has no version, and the next pruning deletes it.
        await store.policy_versions.mark_pruned(pruned, attempt=target.attempt)
        files = {storage.name_of(policy.location): policy.files for policy in known}
        for name in deleted:
            await storage.delete(f"{target.root}/{name}", files.get(name, ()))
        logger.debug("deleted %s", deleted)


async def _folder_names(store: Store, root: str) -> list[str]:
    """Return the names of the folders in ``root``; by the database where the storage lists nothing."""
    if not root.startswith("http"):
        return await storage.folder_names(root)
    stored = [policy for policy in await store.policy_versions.all() if policy.pruned_at is None]
    return [storage.name_of(policy.location) for policy in stored if policy.location.startswith(f"{root}/")]


def version_name(version: int, attempt: int | None = None) -> str:
    """Return the name of a version's folder: ``v000007``, or ``v000007-3`` for trainer attempt 3."""
    return f"v{version:06d}" + ("" if attempt is None else f"-{attempt}")


def free_name(names: Collection[str], version: int, attempt: int, *, is_contested: bool) -> str:
    """Return a folder name for ``version`` that no other trainer writes or has written; ``names`` exist.

    ``is_contested``: another trainer has reserved the number and may still write its folder.
    """
    plain = version_name(version)
    return version_name(version, attempt) if is_contested or plain in names else plain


async def place_version(temporary: Path, location: str, version: int, written: Written) -> None:
    """Write the manifest of ``version`` into ``temporary``, and rename or upload it to ``location``."""

    def finish() -> None:
        with explain_write_errors(temporary, written.bytes):
            write_manifest(temporary, version=version, files=written.files, tensors=written.tensors)
            if not storage.is_remote(location):
                finish_folder(temporary, Path(location))

    await asyncio.to_thread(finish)
    if storage.is_remote(location):
        await storage.upload(temporary, location, written.files)


def version_folders(names: Iterable[str]) -> dict[str, int]:
    """Return {folder name: version} for those of ``names`` that are version folders."""
    found = ((name, _FOLDER.fullmatch(name)) for name in names)
    return {name: int(match[1]) for name, match in found if match is not None}


def with_bases(kept: Iterable[int], known: Iterable[PolicyVersion]) -> set[int]:
    """Return ``kept``, and the versions that these need: of which they are deltas or adapters."""
    base = {policy.id: policy.base for policy in known}
    found: set[int] = set()
    for version in kept:
        needed: int | None = version
        while needed is not None and needed not in found:
            found.add(needed)
            needed = base.get(needed)
    return found


def kept_versions(folders: Iterable[int], in_use: Collection[int], *, keep: int) -> set[int]:
    """Return the versions to keep on disk: the newest ``keep`` (at least two) and those in use."""
    # Keep two: an engine may still be loading the one before the newest.
    return set(sorted(set(folders))[-max(keep, 2) :]) | set(in_use)


def surplus_folders(
    folders: dict[str, int], known: Iterable[PolicyVersion], kept: Collection[int], newest: int
) -> tuple[list[str], list[int]]:
    """Return the names of the folders to delete, and the versions that lose their folder.

    These are the versions outside ``kept``, and folders that no document refers to: a trainer that was killed
    or replaced left them. A folder above ``newest`` stays, since it may be being published.
    """
    policies = {policy.id: policy for policy in known}
    deleted, pruned = [], []
    for name, version in folders.items():
        policy = policies.get(version)
        if policy is not None and storage.name_of(policy.location) == name and policy.pruned_at is None:
            if version not in kept and policy.status is not VersionStatus.RESERVED:
                deleted.append(name)
                pruned.append(version)
        elif version <= newest:
            deleted.append(name)
    return deleted, pruned


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


async def published_versions(store: Store) -> AsyncIterator[PolicyVersion]:
    """Yield every published version, newest first; read them a page at a time."""
    below: int | None = None
    while page := await store.policy_versions.published(_PAGE, below=below):
        for version in page:
            yield version
        below = page[-1].id
