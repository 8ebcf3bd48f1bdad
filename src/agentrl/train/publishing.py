"""A step's files: save checkpoints and publish weights in the background, one of each at a time."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from agentrl.base.atomic_folder import begin_folder, discard_folder
from agentrl.base.concurrency import Backoff, wait_for_any
from agentrl.base.device_lease import DeviceLease
from agentrl.base.folder_owner import confirm
from agentrl.base.spans import tracer
from agentrl.config.schema import TrainConfig
from agentrl.documents.run import LiveWeights, PolicyVersion
from agentrl.documents.training import CheckpointState
from agentrl.errors import AgentRLError, PublishError
from agentrl.train import checkpoint
from agentrl.train.checkpoint import Unfinished
from agentrl.train.controller import Controller
from agentrl.train.folders import RunFolders, place_of
from agentrl.train.lease import HeldTrainerLease
from agentrl.weights.folder import architecture, explain_write_errors, link_files, require_space
from agentrl.weights.local_copy import is_in_place
from agentrl.weights.publish import LIVE_ENGINE_SECONDS, PublishTarget, publish, publish_live

if TYPE_CHECKING:
    from agentrl.model.load import Policy
    from agentrl.store.client import Store
    from agentrl.weights.snapshot import Written

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAST_SHARE = 0.9
"""Least share of the change by training in published weights; below it, sampler and trainer differ."""
WRITE_SECONDS = 3600.0
"""How long training waits for a version or a checkpoint in flight; a dead disk ends it."""
REPORT_SECONDS = 30.0
"""Interval of the lines about such a wait."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_SERVED_POLL_SECONDS = 1.0
_SLOWEST_TRANSFER = 20e6
"""Bytes per second; ``weights.weight_group`` gives up a slower transfer."""


class Clock:
    """Adds up the seconds of a step's parts, for its metrics ``seconds_…``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to those of ``part``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Return the metrics, and count from 0 again."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return {f"seconds_{part}": seconds for part, seconds in taken.items()}


@dataclass(kw_only=True)
class DeviceTurns:
    """Lets one task at a time use the weights: one trains a step, another copies them between two steps.

    With a lease, an engine uses the same device: the trainer has it from a step's data until the weights are
    copied to the host.
    """

    lease: DeviceLease | None
    controller: Controller
    clock: Clock = field(default_factory=Clock)
    has_device: bool = True
    """The trainer is built on the device."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_taken(self) -> bool:
        """Whether a task has its turn."""
        return self._lock.locked()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Have a turn in the block; then give the device to the engine.

        After an error, which ends training, the trainer keeps the device: it may still copy a checkpoint.
        """
        async with self._lock:
            yield
            if self.lease is not None and self.has_device:
                with self.clock("device"):
                    await asyncio.to_thread(self.controller.to_host)
                    self.has_device = False
                    self.lease.release()

    async def take_device(self) -> None:
        """Have weights and moments on the device for the rest of the turn."""
        if self.lease is not None and not self.has_device:
            with self.clock("device"):
                await self.lease.acquire(urgent=True)
                await asyncio.to_thread(self.controller.to_device)
                self.has_device = True


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
    """The step of that version's weights; −1 if its files are gone."""
    train_steps: list[str] = field(default_factory=list)
    """``_id`` of each committed TrainStep in the weights."""
    replay: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """{step: (data id, …)} that reverted steps had planned; repeated, they train the same data."""

    @property
    def is_published(self) -> bool:
        """Whether the current weights are published."""
        return self.step == self.published_step


@dataclass(kw_only=True)
class StepFiles:
    """The weights of one step that are being written while training goes on."""

    step: int
    train_step: str | None
    base: PolicyVersion | None
    """The version from which they differ; None for whole weights."""
    began: float = field(default_factory=time.perf_counter)
    folder: Path | None = None
    """Where they are written before they are published; None if they are in the trainer's memory alone."""
    written: Future[Written] = field(init=False)
    """What is in ``folder``."""
    live: Future[LiveWeights] | None = None
    """What is in the trainer's memory."""
    linked: Future[None] = field(default_factory=Future)
    """Done when no checkpoint has yet to link the files: they are renamed or deleted after that."""
    task: asyncio.Task[None] = field(init=False)
    """Publishes them."""

    def link(self, model: Path) -> None:
        """Link the files into ``model`` of a checkpoint once they are written; blocks."""
        try:
            if self.written.exception() is not None:
                raise PublishError("the version of the same step was not written")
            assert self.folder is not None
            link_files(self.folder, model)
        finally:
            self.linked.set_result(None)


@dataclass(kw_only=True)
class Publisher:
    """Writes the files of steps: versions for the engines, and checkpoints. The loop offers it each step.

    Training waits while a step is copied to host memory, and where the staleness bound demands a version that
    is not published yet. Setting ``stop`` ends such a pause, and training with it.
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
    keeps_sampled: bool = False
    """Whether versions stay on disk while an unfinished group has tokens of theirs."""
    saved: Path | None = None
    """The newest complete checkpoint."""
    saved_step: int = 0
    published: PolicyVersion | None = None
    """The newest version that this trainer has published."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the newest publications, as the next step reports them."""
    flight: StepFiles | None = None
    """The version in flight, or the last one that was."""
    failure: PublishError | None = None
    """Why the last publication failed."""
    is_overdue: bool = False
    """The last publication failed; the next step is published, whether it is due or not."""
    is_ending: bool = False
    """Begin no version but the last one."""
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by an unexpected error of the publishing task (``flight.task`` has it), which ends training."""
    unstored: int = 0
    """Versions since the last stored one that were in the trainer's memory alone."""
    _base: PolicyVersion | None = None
    """The version from which the next one may differ: every rank holds its weights."""
    _deltas: int = 0
    """Versions since the last whole weights."""
    _deltas_from: int = 0
    """The version from which deltas are tried again, after one that was not small."""
    _saving: asyncio.Task[PublishError | None] | None = None
    _saving_step: int = 0

    async def offer(self) -> None:
        """Copy the weights of the newest step, if a version or a checkpoint of it is due; call it in a turn.

        They are written while training goes on. A version that is due while an earlier one is written is
        published after that, or a newer one is. What fails is logged, and tried again after the next step.
        """
        saves = self.progress.step % self.config.save_steps == 0 and self.progress.step != self.saved_step
        if saves:
            self._log_unsaved(await self._end_saving())
        with self.turns.clock("publish"):
            await self._begin(links=saves)
        if saves:
            self._log_unsaved(await self._begin_saving(*self.folders.roots))

    async def wait_for_bound(self) -> None:
        """Wait until the newest version is as new as sampling needs it; retry what failed meanwhile.

        Raises PublishError if publishing still fails after ``publish_wait_seconds``.
        """
        progress = self.progress
        deadline = time.monotonic() + self.config.publish_wait_seconds
        backoff = Backoff("a version to be published", _FIRST_PAUSE, _LONGEST_PAUSE)
        while (ahead := progress.step - progress.published_step) > self.max_staleness:
            if self.flight is not None and not self.flight.task.done():
                await self._end_version()
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
                await wait_for_any(self.stop, self.lease.lost, timeout=min(backoff.next(), max(left, 0.0)))
                self.failure = None
            async with self.turns.turn():
                await self._begin()
        # Publish what ``offer`` skipped: the version in flight may have ended after it, in the same turn.
        if self.flight is not None and self.flight.task.done() and self._is_due():
            async with self.turns.turn():
                await self._begin()
        self._log_unpublished()

    async def finish(self) -> None:
        """Save and publish the last step if needed. PublishError says what failed and what is saved."""
        self._log_unsaved(await self._end_saving())
        # Wait in a turn: no other version is begun when the one in flight ends.
        async with self.turns.turn():
            await self._end_version()
            # Forget earlier failures: the last step is published now, and its result counts.
            self.failure = None
            await self._begin(links=self.progress.step != self.saved_step, is_last=True)
            unsaved = await self._save()
            await self._end_version()
        errors = [error for error in (unsaved, self.failure) if error is not None]
        if errors:
            raise self._stopped(*errors)

    async def keep(self, error: PublishError) -> PublishError:
        """Save a checkpoint before training ends with ``error``; return an error that says what is saved."""
        try:
            self._log_unsaved(await self._end_saving())
            async with self.turns.turn():
                other = await self._save()
        except PublishError as hangs:
            other = hangs
        return self._stopped(error) if other is None else self._stopped(error, other)

    async def close(self) -> None:
        """Wait for what is in flight when training ends with an error, and log what it fails with."""
        for task in (None if self.flight is None else self.flight.task, self._saving):
            try:
                if task is not None:
                    await _wait_for_write(task, "what is in flight")
            except AgentRLError as error:
                logger.error("%s", error.message)
            # Raise nothing: it would replace the error that ends training, and skip the other write.
            except Exception:
                logger.exception("a write in flight failed too")

    async def serve_last(self) -> None:
        """Hold the last version until the live engines have taken it over the network.

        Its files may be on a disk that an engine of another host does not reach. Waits at most as long as a
        slow transfer takes; an engine that is only starting is not waited for.
        """
        last = self.published
        if last is None or last.live is None or last.live.kind != "distributed":
            return
        seconds = LIVE_ENGINE_SECONDS + last.bytes / _SLOWEST_TRANSFER
        deadline, is_told = time.monotonic() + seconds, False
        while not self.lease.lost.is_set():
            engines = await self.store.services.live(LIVE_ENGINE_SECONDS)
            # None: an engine that starts serves no version yet.
            behind = [
                item.id
                for item in engines
                if item.policy_version is not None and item.policy_version < last.id
            ]
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

    async def _begin(self, *, links: bool = False, is_last: bool = False) -> None:
        """Begin to publish the newest step in a turn, if it is due and no other is being published.

        With ``links``, a checkpoint of the step is copied next, and may link the files.
        """
        if self.flight is not None:
            if not self.flight.task.done():
                return
            self.flight.task.result()  # raises what ended it, if that was no PublishError
        # Store what is in memory alone at the end: it dies with this process.
        if self._is_due() or (is_last and (self.unstored or not self.progress.is_published)):
            await self._begin_next(links=links, is_last=is_last)

    def _is_due(self) -> bool:
        """Return whether to publish the weights of the newest step.

        They are published every ``publish_steps``, and earlier if sampling waits for newer weights: admission
        counts the steps since the newest published version as staleness.
        """
        step, published, every = self.progress.step, self.progress.published_step, self.config.publish_steps
        # Count multiples since the published step: one may have passed while a version was written.
        is_needed = step // every > published // every or step - published > self.max_staleness
        return step > published and (is_needed or self.is_overdue)

    async def _begin_next(self, *, links: bool = False, is_last: bool = False, root: bool = False) -> None:
        """Copy the newest step, and begin to publish it; keep a PublishError in ``failure``.

        ``root`` begins a trace: no step's span is open.
        """
        self._log_unpublished()
        # Ask before anything is written: the folder may be a successor's by now.
        await self.lease.check()
        try:
            with tracer().span("publish", root=root):
                files = await self._copy(is_last=is_last)
        except PublishError as error:
            await self._failed(error)
            return
        is_whole = files.folder is not None and files.base is None and self.controller.policy.adapter is None
        if not (links and is_whole):
            files.linked.set_result(None)
        files.task = asyncio.create_task(self._publish(files))
        files.task.add_done_callback(self._ended)
        self.flight = files

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.broken.set()

    async def _copy(self, *, is_last: bool) -> StepFiles:
        progress, sync = self.progress, self.config.weight_sync
        is_stored = sync == "disk" or is_last or self.unstored + 1 >= self.config.full_every
        # Ask the engines: if all lack a link of the chain, they stay behind until the bound ends training.
        engines = await self.store.services.live(LIVE_ENGINE_SECONDS)
        base = self._choose_base(lacks_link=any(engine.needs_full for engine in engines))
        step, needed = progress.step, self.controller.writer.model.bytes

        def copy() -> StepFiles:
            files = StepFiles(
                step=step, train_step=progress.train_steps[-1] if progress.train_steps else None, base=base
            )
            if sync != "disk":
                files.live = self.controller.hold_version(step, sync)
            if is_stored:
                # Beside the versions, so that it can be renamed; a URL gets a copy of it.
                target = self.folders.confirm_versions() / f"step-{step:06d}"
                with explain_write_errors(target, needed):
                    require_space(target, needed)
                    files.folder = begin_folder(target)
                since = None if base is None else base.step
                files.written = self.controller.write_version(step, files.folder, since)
            return files

        await self.turns.take_device()
        files = await asyncio.to_thread(copy)
        self._report_rounding(self.controller.writer.share, self.controller.policy)
        return files

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

    async def _publish(self, files: StepFiles) -> None:
        """Publish a version once it is written, and then newer weights, if training waits for data."""
        progress = self.progress
        try:
            published = await self._publish_files(files)
        except PublishError as error:
            await self._failed(error)
        else:
            self.unstored = 0 if published.is_stored else self.unstored + 1
            if published.is_stored:
                self._base = published
            self._deltas = self._deltas + 1 if files.base is not None else 0
            # Pause deltas above half the bytes: with a high learning rate or float32 they stay so large.
            if files.base is not None and 2 * published.bytes > self.controller.writer.model.bytes:
                self._deltas_from = published.id + self.config.full_every
            self.published, self.is_overdue = published, False
            progress.version, progress.published_step = published.id, files.step
            self.metrics["seconds_publish_background"] = time.perf_counter() - files.began
            self.metrics["published_bytes"] = published.bytes
        # Leave it to the step that is being trained, if there is one: ``offer`` follows it.
        if files.step < progress.step and not (self.is_ending or self.turns.is_taken):
            async with self.turns.turn():
                if self.flight is files and self._is_due() and not self.is_ending:
                    await self._begin_next(root=True)

    async def _publish_files(self, files: StepFiles) -> PolicyVersion:
        attempt, live = self.progress.attempt, None
        if files.folder is None:
            assert files.live is not None
            live = await asyncio.wrap_future(files.live)
            return await publish_live(
                self.store, live, attempt=attempt, step=files.step, train_step_id=files.train_step
            )
        base = 0 if self.controller.policy.publishes_adapter else None
        if files.base is not None:
            base = files.base.id
        target = PublishTarget(
            root=self.folders.versions,
            attempt=attempt,
            keep=self.config.published_versions_kept,
            keep_every=self.config.keep_every,
            keeps_sampled=self.keeps_sampled,
        )
        try:
            with explain_write_errors(files.folder, self.controller.writer.model.bytes):
                written = await asyncio.wrap_future(files.written)
            # Wait for memory after the files: if it is short, nobody writes to the folder that is discarded.
            if files.live is not None:
                live = await asyncio.wrap_future(files.live)
            # Link before publishing, which renames the folder.
            await asyncio.wrap_future(files.linked)
            return await publish(
                self.store, files.folder, written, target,
                step=files.step, train_step_id=files.train_step, live=live, base=base,
            )  # fmt: skip
        finally:
            # Wait here too: the files may be whole although something else has failed.
            await asyncio.wrap_future(files.linked)
            await asyncio.to_thread(discard_folder, files.folder)

    async def _end_version(self) -> None:
        """Wait for the version in flight, if any; ``failure`` says why it failed."""
        if self.flight is not None:
            await _wait_for_write(self.flight.task, f"the version of step {self.flight.step}")

    async def _failed(self, error: PublishError) -> None:
        # Ask first: if another trainer has taken over, that is the error, and no retry may follow.
        await self.lease.check()
        self.is_overdue, self.failure = True, error

    def _log_unpublished(self) -> None:
        error, self.failure = self.failure, None
        if error is not None:
            logger.error("step %d is not published: %s", self.progress.step, error)

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

    async def _save(self) -> PublishError | None:
        """Save the last step and wait for it, in the fallback folder if ``output`` cannot be written."""
        error = await self._begin_saving(*self.folders.roots) or await self._end_saving()
        if error is None or self.folders.fallback is None:
            return error
        return await self._begin_saving(self.folders.fallback) or await self._end_saving()

    async def _begin_saving(self, *roots: Path) -> PublishError | None:
        """Begin to save the newest step in the first of ``roots`` that has space; return why that fails.

        Call it in a turn.
        """
        progress, policy, files = self.progress, self.controller.policy, self.flight
        if progress.step == self.saved_step:
            return None
        self._saving_step = progress.step
        began, link = time.perf_counter(), None
        if files is not None and not files.linked.done():
            link = files.link
        elif (
            self.published is not None
            and self.published.step == progress.step
            and self.published.is_stored
            and is_in_place(self.published)
            and policy.adapter is None
        ):
            link = partial(link_files, Path(self.published.location))
        unfinished = None
        try:
            state = CheckpointState(
                run_name=self.folders.owner.run,
                step=progress.step,
                policy_version=progress.version,
                train_steps=tuple(progress.train_steps),
                architecture=architecture(policy.base),
                attempt=progress.attempt,
            )
            with tracer().span("save"):
                await self.turns.take_device()
                unfinished = await self._copy_checkpoint(roots, state, link)
        except PublishError as error:
            return error
        finally:
            # Say it after an error too: the publication waits for this before it renames its files.
            if unfinished is None and files is not None and not files.linked.done():
                files.linked.set_result(None)
        self._saving = asyncio.create_task(self._finish_saving(unfinished, began))
        return None

    async def _copy_checkpoint(
        self, roots: Sequence[Path], state: CheckpointState, link: Callable[[Path], None] | None
    ) -> Unfinished:
        root, *others = roots

        def begin() -> Unfinished:
            confirm(root, self.folders.owner)
            return checkpoint.begin(root, state, self.controller, link=link)

        try:
            return await asyncio.to_thread(begin)
        except PublishError as error:
            await self.lease.check()
            if not others:
                raise
            logger.error("step %d is saved in --fallback_output_dir: %s", state.step, error)
        return await self._copy_checkpoint(others, state, link)

    async def _finish_saving(self, unfinished: Unfinished, began: float) -> PublishError | None:
        """Wait until a checkpoint is written that was ``began`` then; return why it failed, if it did."""
        try:
            self.saved = await asyncio.to_thread(
                unfinished.finish, limit=self.config.save_total_limit, fence=self.lease.fence()
            )
            await self.lease.record_saved(place_of(self.saved), unfinished.state)
        except PublishError as error:
            # Return it: nobody awaits the task yet, and asyncio would report the error when it is collected.
            return error
        self.saved_step = unfinished.state.step
        self.metrics["seconds_save_background"] = time.perf_counter() - began
        logger.info("saved %s", self.saved)
        return None

    async def _end_saving(self) -> PublishError | None:
        """Wait for the checkpoint in flight, if any; return why it failed, if it did."""
        if self._saving is None:
            return None
        error = await _wait_for_write(self._saving, f"the checkpoint of step {self._saving_step}")
        self._saving = None
        if error is not None:
            await self.lease.check()
        return error

    def _log_unsaved(self, error: PublishError | None) -> None:
        if error is not None:
            logger.error("step %d has no checkpoint: %s", self._saving_step, error)

    def _stopped(self, *errors: PublishError) -> PublishError:
        """Return the error that ends training: what could not be written, and what is saved."""
        progress = self.progress
        kept = "no checkpoint" if self.saved is None else f"{self.saved} (step {self.saved_step})"
        hints = dict.fromkeys(error.hint for error in errors if error.hint)
        return PublishError(
            f"training stops at step {progress.step}: {'; '.join(error.message for error in errors)}."
            f" Saved: {kept}, version {progress.version} of step {progress.published_step}",
            hint="; ".join(hints) + "; then start the trainer again: it resumes",
        )


async def _wait_for_write(task: asyncio.Task[T], what: str) -> T:
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
