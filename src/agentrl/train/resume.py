"""Where a trainer starts: the database is brought back to its checkpoint, or to the base model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.documents.status import StepStatus
from agentrl.documents.training import TrainStep
from agentrl.errors import ConfigError
from agentrl.train.checkpoint import Checkpoint
from agentrl.train.rewards import reward_until
from agentrl.weights.publish import next_version, publish_base

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Progress:
    """How far training has come."""

    attempt: int
    """Which start of a trainer on this run this is, from 1."""
    step: int = 0
    """Committed optimizer steps that the weights contain."""
    version: int = 0
    """The newest published version."""
    is_published: bool = True
    """The weights are those of ``version``."""
    train_steps: list[str] = field(default_factory=list)
    reward_until: datetime | None = None


async def begin(store: Store, base: Path, checkpoint: Checkpoint | None) -> Progress:
    """Re-open what later steps consumed, withdraw what they published, and say where to go on.

    Publishes the base model as version 0 on a new run. Raises ConfigError when the database does not know
    the steps that the checkpoint contains.
    """
    steps = await store.training.steps(status=None)
    step = checkpoint.state.step if checkpoint else 0
    contained = list(checkpoint.state.train_steps) if checkpoint else []
    unknown = set(contained) - {item.id for item in steps}
    if checkpoint and unknown:
        raise ConfigError(
            f"{checkpoint.folder} contains {len(unknown)} steps that database {store.run_name} does not know:"
            " the database has been emptied, or is another one",
            cure="give --resume_from_checkpoint none, or another --output_dir, to start anew",
        )
    await publish_base(store, base)
    undone = await store.training.revert_after(step)
    if undone:
        logger.info("%d steps after step %d are undone; their data are ready again", undone, step)
    newest = await next_version(store) - 1
    version = checkpoint.state.policy_version if checkpoint else 0
    await store.policies.withdraw_after(version)
    known = [item for item in steps if item.id in contained and item.status is StepStatus.COMMITTED]
    return Progress(
        attempt=1 + max((_attempt(item) for item in steps), default=0),
        step=step,
        version=newest,
        is_published=newest == version and (checkpoint is None or checkpoint.state.is_published),
        train_steps=contained,
        reward_until=reward_until(known),
    )


def _attempt(step: TrainStep) -> int:
    return int(step.id.split("/")[0])
