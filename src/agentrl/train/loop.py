"""The training loop: take data, train a step in a worker thread, commit it, save, publish."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.base.concurrency import end_tasks, wait_for_any
from agentrl.base.spans import NO_SPAN, Attributes, Span, tracer
from agentrl.data.stream import StepData, StepSource
from agentrl.documents.model_call import pack_halves
from agentrl.documents.run import Doing
from agentrl.documents.status import TrainerEnd, Work
from agentrl.documents.training import JUDGED, TokenSpan, TokenStatistics, TrainStep, statistics_key
from agentrl.errors import AgentRLError, PublishError, TrainingError
from agentrl.observe.progress import StepView
from agentrl.observe.terminal import excerpt
from agentrl.observe.trackers import Tracker
from agentrl.store.mechanics.retry import retry_outages
from agentrl.train.publishing import Publisher

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.train.step import TokenValues

logger = logging.getLogger(__name__)

_REASON_CHARS = 300
_LINKS = 128
"""Most links of a span that OpenTelemetry keeps."""
_PHASES = ("pack", "forward", "backward", "optimizer")
"""Parts of the updates that a step times, as the trace shows them."""
_METRICS = (
    "loss", "reward", "pass_rate", "grad_norm", "lr", "kl_k3", "staleness_mean", "trajectories", "tokens",
    "trainable_tokens", "tokens_per_second", "mfu",
)  # fmt: skip
"""What the span of a step holds."""
CLOSE_SECONDS = 10.0
"""How long ``TokenWriter.close`` waits for the last write."""


class Trainer:
    """The trainer of a run. Setting ``stop`` lets ``run`` finish and save the current step, and return."""

    def __init__(self, publisher: Publisher, stream: StepSource, view: StepView, tracker: Tracker) -> None:
        self.publisher, self.stream, self.view, self.tracker = publisher, stream, view, tracker
        self.store, self.config, self.controller = publisher.store, publisher.config, publisher.controller
        self.progress, self.lease, self.stop = publisher.progress, publisher.lease, publisher.stop
        self.turns, self.clock = publisher.turns, publisher.turns.clock
        self.token_writer = TokenWriter(self.store)
        self.skipped = 0
        """Steps in a row whose loss or gradient was not finite."""
        self.counted_at = time.monotonic()
        """When the last step took the trainer's time."""

    async def run(self) -> None:
        """Train until ``max_steps``, the end of the data or ``stop``; then save and publish the last step."""
        try:
            await self._train_all()
            self.lease.doing = Doing(work=Work.SAVING, what=f"step {self.progress.step}")
            await self.publisher.finish()
        except PublishError:
            raise
        except BaseException:
            await self.publisher.close()
            raise
        if self.progress.step == 0 and not self._is_done():
            raise await self._nothing_trained()
        is_stopped = self.stop.is_set() and not self._has_all_steps()
        # Say it before the wait below: the run has ended, whether or not engines take its last version.
        self.lease.ended = TrainerEnd.STOPPED if is_stopped else TrainerEnd.FINISHED
        self.lease.doing = Doing(work=Work.WAITING, what="until the engines serve the last version")
        await self.publisher.serve_last()

    async def _train_all(self) -> None:
        try:
            # Publish first: a trainer that is killed between saving and publishing leaves its last step out.
            async with self.turns.turn():
                await self.publisher.offer()
            await self.publisher.wait_for_bound()
            while not self._is_done():
                began, step = time.time(), self.progress.step + 1
                self.lease.doing = Doing(work=Work.WAITING, what=f"for the data of step {step}")
                with self.clock("data"):
                    batch = await self._next_data()
                if batch is None:
                    break
                await self._train(batch, began)
        except PublishError as error:
            raise await self.publisher.keep(error) from error
        finally:
            # After an error, the weights may contain a step that is not committed.
            self.publisher.is_ending = True
            await self.stream.close()
            await self.token_writer.close()

    async def _nothing_trained(self) -> TrainingError:
        """Return the error for a run of which no group could be trained, with the kinds of failure."""
        endings = await self.store.records.failure_summary("train")
        reasons = [f"{count} {kind}: {excerpt(first, _REASON_CHARS)}" for kind, count, first in endings]
        return TrainingError(
            "every group is sampled, and none could be trained"
            + (":\n  " + "\n  ".join(reasons) if reasons else "; no trajectory failed or was abandoned"),
            hint="fix the cause (`agentrl try` runs one task), re-open failed slots with `agentrl db reopen"
            f" --run_name {self.store.run_name}`, and start samplers and the trainer; for abandoned groups,"
            " load tasks that the model sometimes solves",
        )

    def _is_done(self) -> bool:
        return self.stop.is_set() or self._has_all_steps()

    def _has_all_steps(self) -> bool:
        return 0 < self.config.max_steps <= self.progress.step

    async def _next_data(self) -> StepData | None:
        """Return the next step's data; None at the end of the data or on ``stop``."""
        take = asyncio.create_task(self.stream.take(self.progress.step + 1))
        try:
            publisher = self.publisher
            await wait_for_any(self.stop, self.lease.lost, publisher.broken, tasks=(take,), timeout=None)
            # Ask the lease and the publisher for the error to raise: the events have none.
            if self.lease.lost.is_set():
                await self.lease.check()
            if publisher.broken.is_set() and publisher.flight is not None:
                publisher.flight.task.result()
            batch = take.result() if take.done() else None
        finally:
            await end_tasks(take)
        if batch is None and not self.stop.is_set() and self.progress.step:
            logger.info("the end of the data: %s", self.stream.end)
        return batch

    async def _train(self, batch: StepData, began: float) -> None:
        """Train a step on ``batch``; ``began`` is when it began to wait for it."""
        progress = self.progress
        self.lease.doing = Doing(work=Work.TRAINING, what=f"step {progress.step + 1}")
        plan = TrainStep(
            # Number a retry: the reverted plan of the skipped step keeps its id.
            id=f"{progress.attempt}/{progress.step + 1}" + (f"/{self.skipped}" if self.skipped else ""),
            step=progress.step + 1,
            policy_version=progress.version,
            data=tuple(item.id for item in batch.data),
            owner=self.lease.owner,
            recorded=batch.recorded,
            scores=dict(batch.scores),
        )
        with await step_span(self.store, plan, batch, began) as span:
            await self.store.steps.plan(plan, attempt=progress.attempt)
            window = await self.stream.window(batch)
            if not 0 < self.config.max_steps <= plan.step:
                self.stream.prefetch(plan.step + 1)
            images = await self.stream.images(batch.data)
            async with self.turns.turn():
                await self.turns.take_device()
                began = time.time()
                result = await asyncio.to_thread(self.controller.train, batch.data, batch.ages, images)
                trace_updates(span, began, result.metrics)
                if not result.is_finite:
                    span.fail("not_finite")
                    await self._skip(plan, result.metrics)
                else:
                    report = await self.stream.report(plan.step, batch, window)
                    # Take the clock here: what is published of this step counts for the next one.
                    metrics = {**result.metrics, **report, **self.publisher.metrics, **self.clock.take()}
                    metrics["gpu_seconds"] = self._gpu_seconds()
                    with tracer().span("commit"):
                        await self._commit(plan, metrics, window.tasks)
                    self.token_writer.start(plan, result.tokens)
                    shown = {f"agentrl.{name}": metrics.get(name) for name in _METRICS}
                    span.set({name: value for name, value in shown.items() if isinstance(value, int | float)})
                    await self.publisher.offer()
            self.lease.doing = Doing(work=Work.PUBLISHING, what=f"the weights of step {progress.step}")
            with self.clock("publish"):
                await self.publisher.wait_for_bound()

    def _gpu_seconds(self) -> float:
        """Return the seconds since the last step, of all ranks; 0 on a device whose engine counts them."""
        since, self.counted_at = self.counted_at, time.monotonic()
        return 0.0 if self.turns.lease is not None else (self.counted_at - since) * self.controller.world.size

    async def _commit(self, plan: TrainStep, metrics: dict[str, Any], counted: Sequence[str]) -> None:
        progress = self.progress
        await self.store.steps.commit(
            plan.id,
            metrics,
            plan.data,
            max_trained_count=self.config.max_trained_count,
            retrained_interval=self.config.retrained_interval,
            attempt=progress.attempt,
            counted=counted,
        )
        progress.step = plan.step
        progress.train_steps.append(plan.id)
        self.skipped = 0
        self.stream.avoid(frozenset())
        self.view.step(plan.step, metrics)
        self.tracker.log(plan.step, metrics)

    async def _skip(self, plan: TrainStep, metrics: dict[str, Any]) -> None:
        """Undo a step whose loss or gradient is not finite; its data are retried after other data."""
        self.skipped += 1
        judged = {name: metrics[name] for name in JUDGED if name in metrics}
        is_critics = all(math.isfinite(metrics[name]) for name in ("loss", "grad_norm"))
        logger.error(
            "step %d is skipped: %s; data: %s", plan.step,
            ", ".join(f"{name} {value}" for name, value in judged.items()), ", ".join(plan.data),
        )  # fmt: skip
        # Stop prefetching: it chooses data of the step after this one, which is tried again first.
        await self.stream.close()
        await self.store.steps.revert_after(self.progress.step, attempt=self.progress.attempt)
        self.stream.avoid(frozenset(plan.data))
        if self.skipped >= self.config.max_bad_steps:
            raise TrainingError(
                f"the loss or gradient of step {plan.step} was not finite {self.skipped} times in a row",
                hint=f"lower --{'critic_' if is_critics else ''}learning_rate, or train in float32 (--dtype"
                " float32 --autocast_bf16 false);"
                " the log names the trajectories, `agentrl audit record ID` shows one",
            )


async def step_span(store: Store, plan: TrainStep, batch: StepData, began: float) -> Span:
    """Return the root span of a step, which ``began`` to wait for its data then."""
    if not tracer().is_recording:
        return NO_SPAN
    now = time.time()
    attributes: Attributes = {
        "agentrl.train_step": plan.id,
        "agentrl.step": plan.step,
        "agentrl.policy_version": plan.policy_version,
        "agentrl.groups": len(batch.groups),
        "agentrl.records": [item.record for item in batch.data][:_LINKS],
    }
    traces = await store.records.trace_ids([item.record for item in batch.data], _LINKS)
    span = tracer().span("train_step", attributes, root=True, begin=began, links=traces)
    span.phase("wait_for_data", began, now)
    return span


def trace_updates(span: Span, began: float, metrics: Mapping[str, Any]) -> None:
    """Add the optimizer updates, which began at ``began`` and have ended, and their phases.

    A phase is the sum over micro-batches: phases are shown one after the other, although they alternate.
    """
    if not span.is_recording:
        return
    compute = span.phase("updates", began, time.time())
    at = began
    for name in _PHASES:
        seconds = float(metrics.get(f"seconds_{name}", 0.0))
        if seconds > 0:
            compute.phase(name, at, at + seconds)
            at += seconds


class TokenWriter:
    """Writes one committed step at a time, in the background. What fails or is too slow is a warning."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writing: asyncio.Task[None] | None = None

    def start(self, step: TrainStep, tokens: Sequence[TokenValues]) -> None:
        """Begin to write the values of a committed step; skip them while an earlier step is being written."""
        if not tokens:
            return
        if self._writing is not None and not self._writing.done():
            logger.warning(
                "step %d: its token statistics are not stored, because the database is still writing those of"
                " an earlier step (a lower --token_statistics_mib writes less)", step.step,
            )  # fmt: skip
            return
        self._writing = asyncio.create_task(self._write(step, tokens))

    async def close(self) -> None:
        """Wait for the last write, at most ``CLOSE_SECONDS``; then give it up."""
        if self._writing is None:
            return
        done, _ = await asyncio.wait([self._writing], timeout=CLOSE_SECONDS)
        if not done:
            await end_tasks(self._writing)
            logger.warning("the token statistics of the last step are not stored: the database is too slow")

    async def _write(self, step: TrainStep, tokens: Sequence[TokenValues]) -> None:
        def documents() -> list[TokenStatistics]:
            return [
                TokenStatistics(
                    id=statistics_key(values.record, step.id),
                    record=values.record,
                    train_step=step.id,
                    step=step.step,
                    spans=tuple(TokenSpan(start=span.start, end=span.end) for span in values.spans),
                    log_ratios=pack_halves(values.log_ratio),
                    entropies=pack_halves(values.entropy),
                )
                for values in tokens
            ]

        # Give up at the first outage: a retry would hold the step's values in memory for its whole length.
        with retry_outages(0):
            try:
                await self._store.training.put_token_statistics(await asyncio.to_thread(documents))
            except AgentRLError as error:
                logger.warning("step %d: its token statistics are not stored: %s", step.step, error.message)
