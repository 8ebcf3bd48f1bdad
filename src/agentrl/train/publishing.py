"""A step's files: save checkpoints and publish weights in the background, one version at a time."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base.atomic_folder import begin_folder, discard_folder
from agentrl.base.concurrency import Backoff, wait_for_any
from agentrl.base.device_lease import DeviceLease
from agentrl.base.spans import tracer
from agentrl.config.schema import TrainConfig
from agentrl.documents.run import InferenceService, LiveWeights, PolicyVersion
from agentrl.documents.training import Checkpoint, CheckpointState, TrainStep
from agentrl.errors import AgentRLError, PublishError
from agentrl.train import checkpoint
from agentrl.train.checkpoint import Unfinished
from agentrl.train.controller import Controller
from agentrl.train.folders import RunFolders, place_of
from agentrl.train.lease import HeldTrainerLease
from agentrl.weights.folder import architecture, explain_write_errors, require_space
from agentrl.weights.local_copy import is_in_place
from agentrl.weights.publish import LIVE_ENGINE_SECONDS, PublishTarget, publish, publish_base, publish_live

if TYPE_CHECKING:
    from agentrl.model.load import Policy
    from agentrl.store.client import Store
    from agentrl.train.controller import Controller
    from agentrl.weights.snapshot import Written


@dataclass(kw_only=True)
class DeviceTurns:
    """Holds the device from a step's data until its weights are copied to the host; always, without a lease.

    The trainer is built in its first turn.
    """

    lease: DeviceLease | None
    controller: Controller
    is_held: bool = True
    seconds: float = 0.0
    """Waiting until the engine gives way, and moving weights and moments, since ``take_seconds``."""

    async def begin(self) -> None:
        """Begin a turn if none has begun: weights and moments are on the device then."""
        if self.lease is None or self.is_held:
            return
        began = time.perf_counter()
        await self.lease.acquire(urgent=True)
        await asyncio.to_thread(self.controller.to_device)
        self.is_held = True
        self.seconds += time.perf_counter() - began

    async def end(self) -> None:
        """Move weights and moments to the host, and give the device to the engine."""
        if self.lease is None or not self.is_held:
            return
        began = time.perf_counter()
        await asyncio.to_thread(self.controller.to_host)
        self.is_held = False
        self.lease.release()
        self.seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """Return ``seconds``, and count from 0 again."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


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


LEAST_SHARE = 0.9
"""Least share of the change by training in published weights; below it, sampler and trainer differ."""
WRITE_SECONDS = 3600.0
"""How long training waits for a version or a checkpoint in flight; a dead disk ends it."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_SERVED_POLL_SECONDS = 1.0
_SLOWEST_TRANSFER = 20e6
"""Bytes per second; ``weights.weight_group`` gives up a slower transfer."""
REPORT_SECONDS = 30.0
"""Interval of the lines about such a wait."""


@dataclass(kw_only=True)
class Publication:
    """A version that is being written while training goes on."""

    step: int
    train_step: str | None
    stored: tuple[Path, Future[Written]] | None
    """The temporary folder and what is written there; None if it is in the trainer's memory alone."""
    base: PolicyVersion | None
    """The version from which it differs; None for whole weights."""
    live: Future[LiveWeights] | None
    checkpoint: asyncio.Future[Unfinished | None]
    """The checkpoint of the same step that links its files; it is published after that."""
    task: asyncio.Task[PublishError | None] = field(init=False)
    """Returns why it failed."""
    began: float


@dataclass(kw_only=True)
class Publisher:
    """Publishes in the background. Setting ``stop`` ends a pause, and training with it.

    Training waits while a step is copied to host memory, and where the staleness bound demands a version that
    is not published yet.
    """

    store: Store
    config: TrainConfig
    controller: Controller
    progress: Progress
    lease: HeldTrainerLease
    turns: DeviceTurns
    folders: RunFolders
    max_staleness: int
    """Maximum number of steps since the newest published version; sampling waits beyond it."""
    stop: asyncio.Event
    published: PolicyVersion | None = None
    """The newest version that this trainer has published."""
    metrics: dict[str, float] = field(default_factory=lambda: {"seconds_publish": 0.0})
    """Of the newest publications, as the next step reports them."""
    flight: Publication | None = None
    """The publication in flight, or an ended one whose result was not looked at yet."""
    failure: PublishError | None = None
    """Why the last publication failed."""
    unstored: int = 0
    """Versions since the last stored one that were in the trainer's memory alone."""
    _base: PolicyVersion | None = None
    """The version from which the next one may differ: every rank holds its weights."""
    _deltas: int = 0
    """Versions since the last whole weights."""
    _deltas_from: int = 0
    """The version from which deltas are tried again, after one that was not small."""

    def is_due(self, step: int) -> bool:
        """Return whether to publish the weights of ``step``.

        They are published every ``publish_steps``, and earlier if sampling waits for newer weights: admission
        counts the steps since the newest published version as staleness.
        """
        ahead = step - self.progress.published_step
        return step % self.config.publish_steps == 0 or ahead > self.max_staleness

    @property
    def is_behind(self) -> bool:
        """Whether newer weights than those in flight wait to be published."""
        return self.flight is not None and self.flight.step < self.progress.step

    async def wait_for_bound(self) -> None:
        """Wait until the newest version is as new as sampling needs it; retry what failed meanwhile."""
        progress = self.progress
        deadline = time.monotonic() + self.config.publish_wait_seconds
        backoff = Backoff("a version to be published", _FIRST_PAUSE, _LONGEST_PAUSE)
        while (ahead := progress.step - progress.published_step) > self.max_staleness:
            if self.flight is not None:
                await self.end()
                if self.failure is None:
                    await self.begin()
                continue
            if self.failure is not None:
                left = deadline - time.monotonic()
                if left <= 0 or self.stop.is_set():
                    raise self.failure
                logger.error(
                    "training pauses at step %d, %d steps ahead of version %d (--max_staleness %d):"
                    " retrying for %.0f s: %s",
                    progress.step, ahead, progress.version, self.max_staleness, left, self.failure,
                )  # fmt: skip
                await self._sleep(min(backoff.next(), max(left, 0.0)))
                self.failure = None
            await self.begin()
        self._log_unpublished()

    def _log_unpublished(self) -> None:
        error, self.failure = self.failure, None
        if error is not None:
            logger.error("step %d is not published: %s", self.progress.step, error)

    async def begin(self, *, links: bool = False, is_last: bool = False) -> None:
        """Begin to publish the step, if due and nothing is in flight; keep an error in ``failure``.

        With ``links``, the caller then sets the ``checkpoint`` of a new ``flight``.
        """
        progress = self.progress
        if self.flight is not None:
            if not self.flight.task.done():
                return
            await self.end()
            self._log_unpublished()
        if progress.is_published and not (is_last and self.unstored):
            return
        if not (is_last or self.is_due(progress.step) or progress.is_overdue):
            return
        # Ask before anything is written: the folder may be a successor's by now.
        await self.lease.check()
        try:
            with tracer().span("publish"):
                await self._copy(links, is_last)
        except PublishError as error:
            await self._failed(error)

    async def _copy(self, links: bool, is_last: bool) -> None:
        progress, policy, sync = self.progress, self.controller.policy, self.config.weight_sync
        is_stored = sync == "disk" or is_last or self.unstored + 1 >= self.config.full_every
        # Ask the engines: if all lack a link of the chain, they stay behind until the bound ends training.
        engines = await self.store.services.live(LIVE_ENGINE_SECONDS)
        base = self._choose_base(lacks_link=any(engine.needs_full for engine in engines))
        step, needed = progress.step, self.controller.writer.model.bytes
        name = f"step-{step:06d}"

        def copy() -> tuple[tuple[Path, Future[Written]] | None, Future[LiveWeights] | None]:
            live = None if sync == "disk" else self.controller.hold_version(step, sync)
            if not is_stored:
                return None, live
            # Beside the versions, so that it can be renamed; a URL gets a copy of it.
            target = self.folders.confirm_versions() / name
            with explain_write_errors(target, needed):
                require_space(target, needed)
                temporary = begin_folder(target)
            since = None if base is None else base.step
            return (temporary, self.controller.write_version(step, temporary, since)), live

        await self.turns.begin()
        began = time.perf_counter()
        stored, live = await asyncio.to_thread(copy)
        publication = Publication(
            step=step,
            train_step=progress.train_steps[-1] if progress.train_steps else None,
            stored=stored,
            base=base,
            live=live,
            checkpoint=asyncio.get_running_loop().create_future(),
            began=began,
        )
        if not links or not is_stored or base is not None:
            publication.checkpoint.set_result(None)
        self._report_rounding(self.controller.writer.share, policy)
        publication.task = asyncio.create_task(self._publish(publication))
        self.flight = publication

    def _choose_base(self, *, lacks_link: bool) -> PolicyVersion | None:
        """Return the version from which the next one is to differ; None for whole weights.

        These begin a trainer and each interval of ``--full_every``, are stored beside ``--weight_sync``, and
        help an engine that ``lacks_link`` of the chain of deltas.
        """
        config, base, self._base = self.config, self._base, None
        is_due = config.weight_sync != "disk" or self._deltas + 1 >= config.full_every
        is_adapter = self.controller.policy.publishes_adapter
        if base is None or is_due or lacks_link or is_adapter or config.publish == "full":
            return None  # the ranks use the memory of the base's snapshot again
        if config.publish == "delta" or base.id >= self._deltas_from:
            self._base = base
        return self._base

    async def _publish(self, publication: Publication) -> PublishError | None:
        """Publish a version once it is written; return why it failed, if it did."""
        try:
            if publication.stored is not None:
                published = await self._publish_stored(publication, *publication.stored)
            else:
                assert publication.live is not None
                live = await asyncio.wrap_future(publication.live)
                published = await publish_live(
                    self.store, live, attempt=self.progress.attempt,
                    step=publication.step, train_step_id=publication.train_step,
                )  # fmt: skip
        except PublishError as error:
            # Return it: nobody awaits the task yet, and asyncio would report the error when it is collected.
            return error
        self.unstored = 0 if published.is_stored else self.unstored + 1
        if published.is_stored:
            self._base = published
        self._deltas = self._deltas + 1 if publication.base is not None else 0
        # Pause deltas above half the bytes: with a high learning rate or float32 files they stay so large.
        if publication.base is not None and 2 * published.bytes > self.controller.writer.model.bytes:
            self._deltas_from = published.id + self.config.full_every
        self.published, progress = published, self.progress
        progress.version, progress.published_step = published.id, publication.step
        progress.is_overdue = False
        self.metrics["seconds_publish_background"] = time.perf_counter() - publication.began
        self.metrics["published_bytes"] = published.bytes
        return None

    async def _publish_stored(
        self, publication: Publication, temporary: Path, write: Future[Written]
    ) -> PolicyVersion:
        """Publish a version whose files are being written; PublishError if that fails."""
        checkpoint: Unfinished | None = None
        try:
            with explain_write_errors(temporary, self.controller.writer.model.bytes):
                written = await asyncio.wrap_future(write)
            # Wait for memory after the files: if it is short, nobody writes to the folder that is discarded.
            live: LiveWeights | None = None
            if publication.live is not None:
                live = await asyncio.wrap_future(publication.live)
            # Link before publishing, which renames the folder.
            checkpoint = await publication.checkpoint
            if checkpoint is not None:
                await asyncio.to_thread(checkpoint.link_model, temporary)
            target = PublishTarget(
                root=self.folders.versions,
                attempt=self.progress.attempt,
                keep=self.config.published_versions_kept,
                keep_every=self.config.keep_every,
            )
            base = 0 if self.controller.policy.publishes_adapter else None
            if publication.base is not None:
                base = publication.base.id
            return await publish(
                self.store, temporary, written, target,
                step=publication.step, train_step_id=publication.train_step, live=live,
                base=base,
            )  # fmt: skip
        finally:
            checkpoint = checkpoint or await publication.checkpoint
            # Fail the checkpoint too: its ``finish`` would wait for the linked files for ever.
            if checkpoint is not None and not checkpoint.model.done():
                checkpoint.model.set_exception(PublishError("the version of the same step was not written"))
            await asyncio.to_thread(discard_folder, temporary)

    async def end(self) -> None:
        """Wait for the publication in flight, if any; keep why it failed in ``failure``."""
        publication = self.flight
        if publication is not None:
            error = await wait_for_write(publication.task, f"the version of step {publication.step}")
            self.flight = None
            if error is not None:
                await self._failed(error)

    async def _failed(self, error: PublishError) -> None:
        # Ask first: if another trainer has taken over, that is the error, and no retry may follow.
        await self.lease.check()
        self.progress.is_overdue, self.failure = True, error

    async def serve_last(self) -> None:
        """Hold the last version until the live engines have taken it over the network.

        Its files may be on a disk that an engine of another host does not reach. Waits at most as long as a
        slow transfer takes; an engine that is only starting is not waited for.
        """
        last = self.published
        if last is None or last.live is None or last.live.kind != "distributed":
            return
        await self.turns.end()  # an engine of the same device cannot load during the trainer's turn
        seconds = LIVE_ENGINE_SECONDS + last.bytes / _SLOWEST_TRANSFER
        deadline, is_told = time.monotonic() + seconds, False
        while not self.lease.lost.is_set():
            engines = await self.store.services.live(LIVE_ENGINE_SECONDS)
            behind = [item.id for item in engines if -1 < _served(item) < last.id]
            if not behind:
                return
            if time.monotonic() > deadline:
                logger.warning(
                    "version %d is not served by %s after %.0f s; the trainer ends: they can load its files"
                    " alone, in %s", last.id, ", ".join(behind), seconds, last.location,
                )  # fmt: skip
                return
            if not is_told:
                is_told = True
                logger.info("waiting until %s serve version %d", ", ".join(behind), last.id)
            await wait_for_any(self.lease.lost, timeout=_SERVED_POLL_SECONDS)

    def _report_rounding(self, share: float | None, policy: Policy) -> None:
        """Keep ``share`` for the metrics, and tell when it falls below ``LEAST_SHARE``."""
        if share is None:
            return
        is_adapter = policy.adapter is not None
        name = "published_adapter_share" if is_adapter else "published_update_share"
        before = self.metrics.get(name, 1.0)
        self.metrics[name] = share
        if share < LEAST_SHARE <= before:
            logger.log(
                # A small learning rate leaves less for long; kl_k3 says how little that changes the policy.
                logging.WARNING if is_adapter else logging.INFO,
                "engines sample with %.2f of what %s: rounding to %s, the dtype of"
                " --model_name_or_path, drops the rest. The share grows with the %s; a higher"
                " --learning_rate, or a copy of the model in float32, raises it",
                share, "the adapter has learned" if is_adapter else "training has changed",
                str(policy.own_dtype).removeprefix("torch."), "adapter" if is_adapter else "change",
            )  # fmt: skip

    async def _sleep(self, seconds: float) -> None:
        """Wait, or return earlier when training is stopped or another trainer takes over."""
        await wait_for_any(self.stop, self.lease.lost, timeout=seconds)


def _served(engine: InferenceService) -> int:
    """Return the version that an engine serves; -1 while it starts."""
    return -1 if engine.policy_version is None else engine.policy_version


async def wait_for_write(task: asyncio.Task[PublishError | None], what: str) -> PublishError | None:
    """Return the result of ``task``; log now and then that it is awaited.

    Raises PublishError if it takes longer than ``WRITE_SECONDS``.
    """
    for _ in range(math.ceil(WRITE_SECONDS / REPORT_SECONDS)):
        if (await asyncio.wait([task], timeout=REPORT_SECONDS))[0]:
            return task.result()
        logger.info("waiting until %s is written", what)
    raise PublishError(
        f"{what} is not written after {WRITE_SECONDS:g} s", hint="check the disk of --output_dir"
    )


@dataclass(kw_only=True)
class Saver:
    """Saves one trainer's checkpoints in the background, one at a time, beside publishing its weights."""

    config: TrainConfig
    controller: Controller
    progress: Progress
    lease: HeldTrainerLease
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
        # Forget earlier failures: the last step is published now, and its result counts.
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
            # Answer also after an error: the publication waits for this before it renames its files.
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
