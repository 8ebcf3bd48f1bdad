"""Publish a trainer's weights in the background, one version at a time."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.atomic_folder import begin_folder, discard_folder
from agentrl.concurrency import wait_for_any
from agentrl.config.schema import TrainConfig
from agentrl.documents.run import InferenceService, LiveWeights, PolicyVersion
from agentrl.errors import PublishError
from agentrl.spans import tracer
from agentrl.train.checkpoint import Unfinished
from agentrl.train.device_turns import DeviceTurns
from agentrl.train.folders import RunFolders
from agentrl.train.lease import TrainerLease
from agentrl.train.progress import Progress
from agentrl.weights.model_folder import explain_write_errors, require_space
from agentrl.weights.publish import LIVE_ENGINE_SECONDS, PublishTarget, publish, publish_live

if TYPE_CHECKING:
    from agentrl.model.load import Policy
    from agentrl.store.client import Store
    from agentrl.train.controller import Controller
    from agentrl.weights.sharded_writer import Written

logger = logging.getLogger(__name__)
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
    lease: TrainerLease
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
        pause = _FIRST_PAUSE
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
                await self._sleep(min(pause, max(left, 0.0)))
                pause = min(2 * pause, _LONGEST_PAUSE)
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
        await self.lease.check()
        try:
            with tracer().span("publish"):
                await self._copy(links, is_last)
        except PublishError as error:
            await self._failed(error)

    async def _copy(self, links: bool, is_last: bool) -> None:
        progress, policy, sync = self.progress, self.controller.policy, self.config.weight_sync
        is_stored = sync == "disk" or is_last or self.unstored + 1 >= self.config.full_every
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
            live: LiveWeights | None = None
            if publication.live is not None:
                live = await asyncio.wrap_future(publication.live)
            if publication.stored is not None:
                published = await self._publish_stored(publication, *publication.stored, live)
            else:
                assert live is not None
                published = await publish_live(
                    self.store, live, attempt=self.progress.attempt,
                    step=publication.step, train_step_id=publication.train_step,
                )  # fmt: skip
        except PublishError as error:
            return error
        self.unstored = 0 if published.is_stored else self.unstored + 1
        if published.is_stored:
            self._base = published
        self._deltas = self._deltas + 1 if publication.base is not None else 0
        if publication.base is not None and 2 * published.bytes > self.controller.writer.model.bytes:
            self._deltas_from = published.id + self.config.full_every
        self.published, progress = published, self.progress
        progress.version, progress.published_step = published.id, publication.step
        progress.is_overdue = False
        self.metrics["seconds_publish_background"] = time.perf_counter() - publication.began
        self.metrics["published_bytes"] = published.bytes
        return None

    async def _publish_stored(
        self, publication: Publication, temporary: Path, write: Future[Written], live: LiveWeights | None
    ) -> PolicyVersion:
        """Publish a version whose files are being written; PublishError if that fails."""
        checkpoint: Unfinished | None = None
        try:
            with explain_write_errors(temporary, self.controller.writer.model.bytes):
                written = await asyncio.wrap_future(write)
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
