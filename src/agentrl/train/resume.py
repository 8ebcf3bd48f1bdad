"""Where a trainer starts: the database is brought back to its checkpoint, or to the base model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.documents.training import TrainStep
from agentrl.train.checkpoint import Checkpoint
from agentrl.weights.publish import publish_base

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Progress:
    """How far training has come."""

    attempt: int
    """Which start of a trainer on this run this is, from 1: the trainer's lease."""
    step: int = 0
    """Committed optimizer steps that the weights contain."""
    version: int = 0
    """The newest published version."""
    published_step: int = 0
    """The step whose weights ``version`` has."""
    is_overdue: bool = False
    """A publication failed, and none has succeeded since."""
    train_steps: list[str] = field(default_factory=list)
    replay: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """What the steps that are undone had planned: {step: (data id, …)}; done again, they train the same."""

    @property
    def is_published(self) -> bool:
        """The weights are those of ``version``."""
        return self.step == self.published_step


async def begin(
    store: Store,
    base: Path,
    checkpoint: Checkpoint | None,
    steps: Sequence[TrainStep],
    *,
    attempt: int,
    replays: bool = True,
) -> Progress:
    """Undo the steps after the checkpoint: withdraw their versions, re-open their data.

    In this order, so that a published version never belongs to a step that has been undone.
    Publishes the base model as version 0 on a new run. ``steps`` are all TrainSteps of the run, as they were
    before; with ``replays`` the steps that are undone are planned again as they were.
    """
    step = checkpoint.state.step if checkpoint else 0
    contained = list(checkpoint.state.train_steps) if checkpoint else []
    await publish_base(store, base, attempt)
    withdrawn = await store.policy_versions.withdraw_after(step, attempt=attempt)
    if withdrawn:
        logger.info("%d policy versions after step %d are withdrawn", withdrawn, step)
    undone = await store.training.revert_after(step, attempt=attempt)
    if undone:
        logger.info("%d steps after step %d are undone; their data are ready again", undone, step)
    newest = await store.policy_versions.latest()
    version, version_step = (newest.id, newest.step) if newest is not None else (0, 0)
    return Progress(
        attempt=attempt,
        step=step,
        version=version,
        published_step=version_step,
        train_steps=contained,
        replay=replay_after(steps, step) if replays else {},
    )


def replay_after(steps: Sequence[TrainStep], step: int) -> dict[int, tuple[str, ...]]:
    """What each step above ``step`` was last planned to train: {step: (data id, …)}.

    A trainer that dies while it replays leaves the plans of its predecessor behind it for the steps that it
    did not reach, so that the next one replays them all.
    """
    plans = sorted((item for item in steps if item.step > step), key=lambda item: item.planned_at)
    return {item.step: item.data for item in plans}
