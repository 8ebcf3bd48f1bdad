"""Save a trainer's checkpoints and publish its weights; roll a run back to the checkpoint that it resumes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.schema import TrainConfig
from agentrl.documents.training import TrainStep
from agentrl.errors import PublishError
from agentrl.spans import tracer
from agentrl.train import checkpoint
from agentrl.train.checkpoint import Checkpoint
from agentrl.train.lease import TrainerLease
from agentrl.weights.folder import architecture, stored_dtype
from agentrl.weights.publish import PublishTarget, publish, publish_base

if TYPE_CHECKING:
    import torch

    from agentrl.store.client import Store
    from agentrl.train.controller import Controller

logger = logging.getLogger(__name__)
LEAST_SHARE = 0.9
"""Least share of an adapter's Δ in published weights; below it, sampler and trainer differ notably."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


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
        logger.info("%d policy versions after step %d are withdrawn", withdrawn, step)
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


@dataclass(kw_only=True)
class Saver:
    """Saves and publishes one trainer's weights. Setting ``stop`` ends a pause, and training with it."""

    store: Store
    run_name: str
    config: TrainConfig
    controller: Controller
    progress: Progress
    lease: TrainerLease
    output: Path
    max_staleness: int
    """Maximum number of steps since the newest published version; sampling waits beyond it."""
    stop: asyncio.Event
    fallback: Path | None = None
    """Folder for checkpoints that cannot be written to ``output``."""
    saved: Path | None = None
    """The newest checkpoint."""
    saved_step: int = 0
    published: Path | None = None
    """The folder of the newest version that this trainer has published."""
    seconds_publish: float = 0.0
    published_share: float | None = None
    """Of what an adapter changes, the share in the newest version; None without an adapter."""

    def is_due(self, step: int) -> bool:
        """Return whether to publish the weights of ``step``.

        They are published every ``publish_steps``, and earlier if sampling waits for newer weights: admission
        counts the steps since the newest published version as staleness.
        """
        ahead = step - self.progress.published_step
        return step % self.config.publish_steps == 0 or ahead > self.max_staleness

    async def after_step(self) -> None:
        """Save a checkpoint and publish the weights, if due; saved steps survive a restart.

        A full disk is logged and retried after the next step, within the staleness bound. Beyond it, training
        pauses. Raises PublishError if publishing still fails after ``publish_wait_seconds``.
        """
        if self.progress.step % self.config.save_steps == 0:
            try:
                with tracer().span("save"):
                    await self._save()
            except PublishError as error:
                await self.lease.check()
                logger.error("step %d has no checkpoint: %s", self.progress.step, error)
        await self.publish_if_due()

    async def publish_if_due(self) -> None:
        """Publish if due. A failure is logged within the staleness bound, and retried in a loop beyond it."""
        progress = self.progress
        if progress.is_published or not (self.is_due(progress.step) or progress.is_overdue):
            return None
        deadline = time.monotonic() + self.config.publish_wait_seconds
        pause = _FIRST_PAUSE
        while True:
            try:
                with tracer().span("publish"):
                    return await self._publish()
            except PublishError as error:
                await self.lease.check()
                progress.is_overdue = True
                ahead, left = progress.step - progress.published_step, deadline - time.monotonic()
                if ahead <= self.max_staleness:
                    logger.error("step %d is not published: %s", progress.step, error)
                    return None
                if left <= 0 or self.stop.is_set():
                    raise
                logger.error(
                    "training pauses at step %d, %d steps ahead of version %d (--max_staleness %d):"
                    " retrying for %.0f s: %s",
                    progress.step, ahead, progress.version, self.max_staleness, left, error,
                )  # fmt: skip
            await self._sleep(min(pause, max(left, 0.0)))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def finish(self) -> None:
        """Save and publish the last step if needed. PublishError says what failed and what is saved."""
        failed: list[PublishError] = []
        for write in (self._save, self._publish):
            try:
                await write()
            except PublishError as error:
                await self.lease.check()
                failed.append(error)
        if failed:
            raise self.stopped(*failed)

    async def keep(self, error: PublishError) -> PublishError:
        """Save a checkpoint before training ends with ``error``; return an error that says what is saved."""
        try:
            await self._save()
        except PublishError as other:
            await self.lease.check()
            return self.stopped(error, other)
        return self.stopped(error)

    def stopped(self, *errors: PublishError) -> PublishError:
        """Return the error that ends training: what could not be written, and what is saved."""
        progress = self.progress
        kept = "no checkpoint" if self.saved is None else f"{self.saved} (step {self.saved_step})"
        hints = dict.fromkeys(error.hint for error in errors if error.hint)
        return PublishError(
            f"training stops at step {progress.step}: {'; '.join(error.message for error in errors)}."
            f" Saved: {kept}, version {progress.version} of step {progress.published_step}",
            hint="; ".join(hints) + "; then start the trainer again: it resumes",
        )

    async def _publish(self) -> None:
        progress = self.progress
        if progress.is_published:
            return
        await self.lease.check()
        started = time.perf_counter()
        policy = self.controller.policy
        published = await publish(
            self.store,
            await asyncio.to_thread(self.controller.published),
            PublishTarget(
                root=self.output / "weights",
                attempt=progress.attempt,
                keep=self.config.published_versions_kept,
                keep_every=self.config.keep_every,
            ),
            tokenizer_files_from=policy.base,
            step=progress.step,
            train_step_id=progress.train_steps[-1] if progress.train_steps else None,
            chat_template=policy.chat_template,
            written=self._written(self.saved and self.saved / "model", self.saved_step),
        )
        self.published = Path(published.location)
        progress.version, progress.published_step = published.id, progress.step
        progress.is_overdue = False
        self.seconds_publish = time.perf_counter() - started
        if policy.adapter is not None:
            self._report_rounding(policy.adapter.rounding.take_share(), policy.own_dtype)

    def _report_rounding(self, share: float | None, dtype: torch.dtype | None) -> None:
        """Keep ``share`` for the metrics, and warn when it falls below ``LEAST_SHARE``."""
        before, self.published_share = self.published_share, share
        if share is not None and share < LEAST_SHARE and (before is None or before >= LEAST_SHARE):
            logger.warning(
                "engines sample with %.2f of what the adapter has learned: rounding to %s, the dtype of"
                " --model_name_or_path, drops the rest. The share grows with the adapter; a higher"
                " --learning_rate, or a copy of the model in float32, raises it",
                share, str(dtype).removeprefix("torch."),
            )  # fmt: skip

    async def _save(self) -> None:
        """Save a checkpoint of the last step, in the fallback folder if ``output`` cannot be written."""
        progress = self.progress
        if progress.step == self.saved_step:
            return
        try:
            await self._save_in(self.output)
        except PublishError as error:
            if self.fallback is None:
                raise
            await self.lease.check()
            logger.error("step %d is saved in --fallback_output_dir: %s", progress.step, error)
            await self._save_in(self.fallback)

    async def _save_in(self, root: Path) -> None:
        progress = self.progress
        state = checkpoint.CheckpointState(
            run_name=self.run_name,
            step=progress.step,
            policy_version=progress.version,
            train_steps=tuple(progress.train_steps),
            architecture=architecture(self.controller.policy.base),
            attempt=progress.attempt,
        )
        self.saved = await asyncio.to_thread(
            checkpoint.save, root, state, self.controller,
            limit=self.config.save_total_limit, fence=self.lease.fence(),
            written=self._written(self.published, progress.published_step),
        )  # fmt: skip
        self.saved_step = progress.step
        logger.info("saved %s", self.saved)

    def _written(self, folder: Path | None, step: int) -> Path | None:
        """Return ``folder``, of ``step``, if it holds the current weights as they are published.

        They are then not gathered again. A checkpoint of an adapter does not hold them, nor one that was
        written in another dtype.
        """
        policy = self.controller.policy
        if folder is None or step != self.progress.step or policy.adapter is not None:
            return None
        try:
            holds = stored_dtype(folder)
        except (OSError, ValueError):
            return None
        wanted = policy.own_dtype or policy.model.dtype
        return folder if holds == str(wanted).removeprefix("torch.") else None

    async def _sleep(self, seconds: float) -> None:
        """Wait, or return earlier when training is stopped or another trainer takes over."""
        events = [asyncio.create_task(event.wait()) for event in (self.stop, self.lease.lost)]
        try:
            await asyncio.wait(events, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in events:
                task.cancel()
            await asyncio.gather(*events, return_exceptions=True)
