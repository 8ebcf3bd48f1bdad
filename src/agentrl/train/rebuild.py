"""Take a run back to the last checkpoint before some steps, and delete the weights that contain them.

The next trainer goes on from that checkpoint and trains the later steps again, with the data that are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.atomic_folder import TEMPORARY, delete_folder, remove_leftovers
from agentrl.documents.checkpoint import Checkpoint, read_checkpoints
from agentrl.documents.family import Relative
from agentrl.documents.retraction import Rebuilt
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import StepStatus, VersionStatus
from agentrl.documents.training import TrainStep
from agentrl.errors import StoreError
from agentrl.weights import storage
from agentrl.weights.storage import is_remote

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
    every = await store.steps.find(status=None)
    committed = [step for step in every if step.status is StepStatus.COMMITTED]
    applied = {step.id for step in committed}
    found = [item for root in roots for item in read_checkpoints(root, undone=True)]
    usable = [item for item in found if applied.issuperset(item.state.train_steps)]
    clean = [item for item in usable if steps.keys().isdisjoint(item.state.train_steps)]
    tainted = [item.folder for item in found if not steps.keys().isdisjoint(item.state.train_steps)]
    by_id = {step.id: step for step in every}
    versions = [
        version
        for version in await store.policy_versions.all()
        if version.is_stored
        and version.pruned_at is None
        and version.status is not VersionStatus.RESERVED
        and version.train_step in by_id
        and not steps.keys().isdisjoint(contained_steps(by_id[version.train_step], every))
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
        versions=versions,
    )


def contained_steps(step: TrainStep, every: Sequence[TrainStep]) -> set[str]:
    """Return the ``_id`` of each step that weights made by ``step`` contain, its own included.

    Of each lower number that is the one of the last attempt up to its own: a later attempt that went back
    would have repeated the number. Attempts count without a clock, unlike ``planned_at``. The steps that a
    child copied from its parent have attempts of the parent, and nothing else has their numbers.
    """
    own = step.attempt
    before: dict[int, TrainStep] = {}
    for item in sorted(every, key=lambda item: (item.attempt <= own, item.attempt)):
        if item.step < step.step and item.committed_at is not None:
            before[item.step] = item
    return {step.id, *(item.id for item in before.values())}


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


async def go_back(store: Store, lease: TrainerLease, found: Influence, roots: Sequence[Path]) -> Rebuilt:
    """Undo the steps after the clean checkpoint, then delete checkpoints and versions. Idempotent.

    ``roots`` are the run's folders of checkpoints. Call ``require_possible`` before. Raises StoreError for
    what cannot be deleted.
    """
    if found.first is not None:
        await store.policy_versions.withdraw_after(found.step, attempt=lease.attempt)
        await store.steps.revert_after(found.step, attempt=lease.attempt)
    deleted = await lease.discard([folder.name for folder in found.checkpoints])
    checkpoints = [folder for folder in found.checkpoints if folder.name in deleted]
    for folder in checkpoints:
        try:
            await asyncio.to_thread(delete_folder, folder)
        except OSError as error:
            raise _not_deleted(folder) from error
    ids = sorted(version.id for version in found.versions)
    for version in found.versions:  # they are withdrawn: nobody loads one while it is deleted
        if not await storage.delete(version.location, version.files):
            raise _not_deleted(version.location)
    local = {Path(version.location).parent for version in found.versions if not is_remote(version.location)}
    await asyncio.to_thread(_delete_leftovers, {*roots, *local})
    await store.policy_versions.mark_pruned(ids, attempt=lease.attempt)
    last = await store.steps.last()
    return Rebuilt(
        step=0 if last is None else last.step,
        checkpoints=tuple(folder.name for folder in checkpoints),
        versions=(ids[0], ids[-1]) if ids else (),
    )


def _delete_leftovers(roots: Collection[Path]) -> None:
    """Delete what is left of folders whose deletion, or writing, was killed. Raises StoreError."""
    for root in sorted(roots):
        remove_leftovers(root)
        for left in root.glob(f"{TEMPORARY}*"):
            raise _not_deleted(left)


def _not_deleted(place: object) -> StoreError:
    return StoreError(
        f"{place} has weights with the influence of what is withdrawn, and cannot be deleted",
        hint="see the log for the reason; call agentrl retract again when it is gone",
    )
