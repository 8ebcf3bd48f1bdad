"""Take a run back to the last checkpoint before some steps, and delete the weights that contain them.

The next trainer goes on from that checkpoint and trains the later steps again, with the data that are left.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.documents.checkpoint import Checkpoint, read_checkpoints
from agentrl.documents.family import Relative
from agentrl.documents.retraction import Rebuilt
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.errors import StoreError
from agentrl.weights import storage

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.train.lease import TrainerLease


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """The weights of a run that contain given steps, and the newest checkpoint without them."""

    first: int | None
    """The first of the steps in the weights; None if all of them are undone."""
    clean: Checkpoint | None
    """None: the base model."""
    checkpoints: Sequence[Path]
    versions: Sequence[PolicyVersion]
    """Those with a folder."""
    children: Sequence[Relative]
    """Runs that began after the first of the steps, or that read its data."""
    pruned: int | None
    """The first step to repeat whose data were pruned; None: all can be repeated."""

    @property
    def step(self) -> int:
        """The step that the run goes back to."""
        return 0 if self.clean is None else self.clean.state.step


async def influence(store: Store, steps: Mapping[str, int | None], roots: Sequence[Path]) -> Influence:
    """Return where ``steps``, {TrainStep: its number if it is in the weights}, have influence.

    ``roots`` are the run's folders of checkpoints.
    """
    committed = await store.steps.find()
    applied = {step.id for step in committed}
    found = [item for root in roots for item in read_checkpoints(root, undone=True)]
    usable = [item for item in found if applied.issuperset(item.state.train_steps)]
    clean = [item for item in usable if steps.keys().isdisjoint(item.state.train_steps)]
    tainted = [item.folder for item in found if not steps.keys().isdisjoint(item.state.train_steps)]
    least = min((int(key.split("/")[1]) for key in steps), default=0)
    versions = [
        version
        for version in await store.policy_versions.all()
        if version.step >= max(1, least)
        and version.is_stored
        and version.pruned_at is None
        and version.status is not VersionStatus.RESERVED
    ]
    first = min((number for number in steps.values() if number is not None), default=None)
    family = await store.ancestry.living_children()
    newest = max(clean, key=lambda item: item.state.step, default=None)
    repeated = [step for step in committed if step.step > (0 if newest is None else newest.state.step)]
    gone = (step.step for step in repeated if first is not None and step.pruned_at is not None)
    return Influence(
        first=first,
        pruned=next(gone, None),
        children=[
            child for child in family if first is not None and max(child.step, *child.steps, 0) >= first
        ],
        clean=newest,
        checkpoints=tainted,
        versions=versions if steps else [],
    )


def require_possible(found: Influence) -> None:
    """Raise StoreError if data of the steps to repeat were pruned, or if a child of the run reads them."""
    if found.pruned is not None:
        raise StoreError(
            f"the run cannot go back to step {found.step}: data of step {found.pruned} were pruned",
            hint="leave --rebuild out: what is withdrawn is deleted, and the weights keep its influence",
        )
    if found.children:
        names = " ".join(child.run for child in found.children)
        raise StoreError(
            f"the run cannot go back to step {found.step}: its children read what came later: {names}",
            hint=f"delete them first (agentrl runs rm {names}), or leave --rebuild out",
        )


async def go_back(store: Store, lease: TrainerLease, found: Influence) -> Rebuilt:
    """Undo the steps after the clean checkpoint, then delete checkpoints and versions. Idempotent.

    Call ``require_possible`` before.
    """
    if found.first is not None:
        await store.policy_versions.withdraw_after(found.step, attempt=lease.attempt)
        await store.steps.revert_after(found.step, attempt=lease.attempt)
    deleted = await lease.discard([folder.name for folder in found.checkpoints])
    checkpoints = [folder for folder in found.checkpoints if folder.name in deleted]
    for folder in checkpoints:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    ids = sorted(version.id for version in found.versions)
    for version in found.versions:  # they are withdrawn: nobody loads one while it is deleted
        await storage.delete(version.location, version.files)
    await store.policy_versions.mark_pruned(ids, attempt=lease.attempt)
    last = await store.steps.last()
    return Rebuilt(
        step=0 if last is None else last.step,
        checkpoints=tuple(folder.name for folder in checkpoints),
        versions=(ids[0], ids[-1]) if ids else (),
    )
