"""Save a trainer's checkpoints in the background, beside the publication of its weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.schema import TrainConfig
from agentrl.documents.checkpoint import CheckpointState
from agentrl.errors import AgentRLError, PublishError
from agentrl.spans import tracer
from agentrl.train import checkpoint
from agentrl.train.checkpoint import Unfinished
from agentrl.train.folders import RunFolders, place_of
from agentrl.train.lease import TrainerLease
from agentrl.train.progress import Progress
from agentrl.train.publishing import Publisher, wait_for_write
from agentrl.weights.folder import architecture
from agentrl.weights.local_copy import is_in_place

if TYPE_CHECKING:
    from agentrl.train.controller import Controller

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Saver:
    """Saves one trainer's checkpoints in the background, one at a time, beside publishing its weights."""

    config: TrainConfig
    controller: Controller
    progress: Progress
    lease: TrainerLease
    folders: RunFolders
    publisher: Publisher
    saved: Path | None = None
    """The newest complete checkpoint."""
    saved_step: int = 0
    _saving: asyncio.Task[PublishError | None] | None = None
    _saving_step: int = 0

    async def after_step(self) -> None:
        """Begin to save and to publish the step, if due; saved steps survive a restart.

        A step that is due while an earlier one is being published is published later, or a newer one is. A
        full disk is logged and retried after the next step, within the staleness bound. Beyond it, training
        pauses. Raises PublishError if publishing still fails after ``publish_wait_seconds``.
        """
        saves = self.progress.step % self.config.save_steps == 0
        if saves:
            self._log_unsaved(await self._end_saving())
        began = time.perf_counter()
        await self.publisher.begin(links=saves and self._links)
        waited = time.perf_counter() - began
        if saves:
            self._log_unsaved(await self._begin_saving(*self.folders.roots))
        await self.publisher.turns.end()  # what is written now lies in the host's memory
        began = time.perf_counter()
        await self.publisher.wait_for_bound()
        self.publisher.metrics["seconds_publish"] = waited + time.perf_counter() - began

    async def finish(self) -> None:
        """Save and publish the last step if needed. PublishError says what failed and what is saved."""
        self._log_unsaved(await self._end_saving())
        await self.publisher.end()
        self.publisher.failure = None
        await self.publisher.begin(links=self._links, is_last=True)
        unsaved = await self._save()
        await self.publisher.end()
        errors = [error for error in (unsaved, self.publisher.failure) if error is not None]
        if errors:
            raise self.stopped(*errors)

    async def keep(self, error: PublishError) -> PublishError:
        """Save a checkpoint before training ends with ``error``; return an error that says what is saved."""
        try:
            self._log_unsaved(await self._end_saving())
            other = await self._save()
        except PublishError as hangs:
            other = hangs
        return self.stopped(error) if other is None else self.stopped(error, other)

    async def close(self) -> None:
        """Wait for what is in flight when training ends with an error, and log what it fails with."""
        publication = self.publisher.flight.task if self.publisher.flight is not None else None
        for task in filter(None, (publication, self._saving)):
            try:
                await wait_for_write(task, "what is in flight")
            except AgentRLError as error:
                logger.error("%s", error.message)

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

    def _log_unsaved(self, error: PublishError | None) -> None:
        if error is not None:
            logger.error("step %d has no checkpoint: %s", self._saving_step, error)

    async def _save(self) -> PublishError | None:
        """Save the last step and wait for it, in the fallback folder if ``output`` cannot be written."""
        error = await self._begin_saving(*self.folders.roots) or await self._end_saving()
        if error is None or self.folders.fallback is None:
            return error
        return await self._begin_saving(self.folders.fallback) or await self._end_saving()

    @property
    def _links(self) -> bool:
        """Whether a checkpoint of the step is due to link the weights of its version."""
        return self.controller.policy.adapter is None and self.progress.step != self.saved_step

    async def _begin_saving(self, *roots: Path) -> PublishError | None:
        """Begin to save the last step in the first of ``roots`` that has space; return why that fails."""
        step, flight, unfinished = self.progress.step, self.publisher.flight, None
        if step == self.saved_step:
            return None
        self._saving_step = step
        links = flight is not None and not flight.checkpoint.done()
        try:
            with tracer().span("save"):
                unfinished = await self._copy_checkpoint(roots, links)
        except PublishError as error:
            return error
        finally:
            if flight is not None and links:
                flight.checkpoint.set_result(unfinished)
        self._saving = asyncio.create_task(self._finish_saving(unfinished, step))
        return None

    async def _copy_checkpoint(self, roots: Sequence[Path], links: bool) -> Unfinished:
        progress, policy = self.progress, self.controller.policy
        state = CheckpointState(
            run_name=self.folders.owner.run,
            step=progress.step,
            policy_version=progress.version,
            train_steps=tuple(progress.train_steps),
            architecture=architecture(policy.base),
            attempt=progress.attempt,
        )
        version = self.publisher.published
        linked = None
        if version is not None and version.step == state.step and version.is_full and policy.adapter is None:
            linked = Path(version.location) if is_in_place(version) else None

        def begin() -> Unfinished:
            self.folders.confirm(roots[0])
            unfinished = checkpoint.begin(
                roots[0], state, self.controller,
                writes_model=not links and linked is None,
            )  # fmt: skip
            if linked is not None:
                unfinished.link_model(linked)
            return unfinished

        await self.publisher.turns.begin()
        try:
            return await asyncio.to_thread(begin)
        except PublishError as error:
            await self.lease.check()
            if not roots[1:]:
                raise
            logger.error("step %d is saved in --fallback_output_dir: %s", state.step, error)
        return await self._copy_checkpoint(roots[1:], links)

    async def _finish_saving(self, unfinished: Unfinished, step: int) -> PublishError | None:
        """Wait until a checkpoint is written; return why it failed, if it did."""
        try:
            self.saved = await asyncio.to_thread(
                unfinished.finish, limit=self.config.save_total_limit, fence=self.lease.fence()
            )
            await self.lease.record_saved(place_of(self.saved), unfinished.state)
        except PublishError as error:
            return error
        self.saved_step = step
        logger.info("saved %s", self.saved)
        return None

    async def _end_saving(self) -> PublishError | None:
        """Wait for the checkpoint in flight, if any; return why it failed, if it did."""
        if self._saving is None:
            return None
        error = await wait_for_write(self._saving, f"the checkpoint of step {self._saving_step}")
        self._saving = None
        if error is not None:
            await self.lease.check()
        return error
