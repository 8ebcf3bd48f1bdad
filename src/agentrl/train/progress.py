"""Roll a run back to the checkpoint that it resumes, and keep how far training has come."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.documents.checkpoint import Checkpoint
from agentrl.documents.training import TrainStep
from agentrl.weights.publish import publish_base

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Progress:
    """How far training has come; the loop updates it."""

    attempt: int
    """The attempt of the trainer's lease."""
    step: int = 0
    """Number of committed optimizer steps in the weights."""
    version: int = 0
    """The newest published policy version."""
    published_step: int = 0
    """The step of that version's weights."""
    is_overdue: bool = False
    """The last publication failed."""
    train_steps: list[str] = field(default_factory=list)
    """``_id`` of each committed TrainStep in the weights."""
    replay: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """{step: (data id, …)} that reverted steps had planned; repeated, they train the same data."""

    @property
    def is_published(self) -> bool:
        """Whether the current weights are published."""
        return self.step == self.published_step


async def roll_back(
    store: Store,
    base: Path,
    checkpoint: Checkpoint | None,
    steps: Sequence[TrainStep],
    *,
    attempt: int,
    replays: bool = True,
) -> Progress:
    """Revert the steps after the checkpoint: first withdraw their versions, then re-open their data.

    In this order, no published version ever belongs to a reverted step. Publishes the base model as version 0
    of a new run. ``steps`` are all TrainSteps of the run, read before; with ``replays``, reverted steps are
    planned again with the same data.
    """
    step = checkpoint.state.step if checkpoint else 0
    contained = list(checkpoint.state.train_steps) if checkpoint else []
    await publish_base(store, base, attempt)
    withdrawn = await store.policy_versions.withdraw_after(step, attempt=attempt)
    if withdrawn:
        logger.info(
            "%d policy versions after step %d, or lost with a trainer, are withdrawn", withdrawn, step
        )
    reverted = await store.steps.revert_after(step, attempt=attempt)
    if reverted:
        logger.info("%d steps after step %d are reverted; their data are ready again", reverted, step)
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
    """Return {step: (data id, …)}, the newest plan of each step above ``step``.

    If a trainer dies while it replays, its predecessor's plans stand for the steps that it did not reach; the
    next trainer replays all of them.
    """
    plans = sorted((item for item in steps if item.step > step), key=lambda item: item.planned_at)
    return {item.step: item.data for item in plans}
