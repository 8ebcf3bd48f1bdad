"""``agentrl teach --self``: the policy's own logprob of each token at the version that sampled it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agentrl.base.processes import stop_on_signals
from agentrl.columns.teacher import TeacherColumn, open_begun
from agentrl.config.load import Configs
from agentrl.config.schema import (
    ClaimConfig,
    EngineConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    TeacherConfig,
)
from agentrl.config.training import VERSION_LOGPROBS
from agentrl.data.finalize_group import to_training_data
from agentrl.data.stream import images_of
from agentrl.documents.images import Image
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record, TopLogprobs
from agentrl.documents.run import PolicyVersion
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData
from agentrl.errors import ColumnError, ConfigError, ModelError, PublishError, StoreError, first_line
from agentrl.observe.begin_run import check_run
from agentrl.store.mechanics.retry import retry_outages
from agentrl.weights.folder import base_folder, verify
from agentrl.weights.local_copy import LocalCopy, chain_to, is_in_place, to_its_end, weights_dir

if TYPE_CHECKING:
    from agentrl.distributed.published_policy import PublishedPolicy
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

_ALL_CALLS = GroupConfig(drop_zero_advantage=False, minimal_advantage=0.0)
"""Rules that leave out no model call because of its advantage, which is not known yet."""
_AS_TRAINED = (
    "dtype", "autocast_bf16", "max_tokens", "prefix_merging", "router_replay", "torch_compile",
    "loss_seq_chunk_size", "loss_vocab_chunk_size",
)  # fmt: skip
"""Flags on which the bits of a logprob depend: their values are those of the run's trainer."""
_MOST_TURNS = 64
"""Turns after which the trajectory that has waited longest is next."""
_POLL_SECONDS = 2.0


@dataclass(eq=False, slots=True)
class _Waiting:
    version: int
    since: int
    """The turns that had been given when it began to wait."""
    turn: asyncio.Future[None]


class VersionTurns:
    """Gives the model to one trajectory at a time, in ascending order of the versions that they need.

    After the highest version come the lowest ones again: the weights go forward by deltas, and back only by
    whole weights. Nobody waits more than about ``_MOST_TURNS`` turns, however many come for later versions.
    """

    def __init__(self) -> None:
        self._version = -1
        self._given = 0
        self._is_taken = False
        self._waiting: list[_Waiting] = []

    @asynccontextmanager
    async def of(self, version: int) -> AsyncIterator[None]:
        """Wait for the turn of ``version``, which lasts as long as the block."""
        if self._is_taken:
            await self._wait(version)
        self._is_taken, self._version = True, version
        self._given += 1
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, version: int) -> None:
        waiting = _Waiting(version, self._given, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled():
                self._pass_on()  # its turn came in the moment in which it was cancelled
            raise

    def _pass_on(self) -> None:
        # A cancelled task's future is done before the task learns of it: leave it out.
        self._waiting = [each for each in self._waiting if not each.turn.done()]
        if not self._waiting:
            self._is_taken = False
            return
        chosen = self._waiting[0]
        if self._given - chosen.since < _MOST_TURNS:
            chosen = min(self._waiting, key=lambda each: (each.version < self._version, each.version))
        self._waiting.remove(chosen)
        # Keep it taken: whoever comes before the chosen one wakes must wait.
        chosen.turn.set_result(None)


class VersionLogprobs:
    """The values of the column ``version_logprobs``, by one model that goes along the versions."""

    def __init__(self, store: Store, policy: PublishedPolicy, copy: LocalCopy) -> None:
        """``copy`` is exact, and this process's own until it is released: engines go only forward."""
        self._store = store
        self._policy = policy
        self._copy = copy
        self._turns = VersionTurns()
        self._loaded: int | None = None
        """The version whose weights the model has; None before the first one, and after a failure."""

    @property
    def name(self) -> str:
        """The model's folder and the dtype of its products."""
        return self._policy.name

    async def values(
        self, task: Task, calls: Sequence[DispatchedSamplingTask]
    ) -> tuple[NDArray[np.float32], TopLogprobs | None]:
        """Return float32 over the generated tokens of ``calls``; NaN for those that are not trained.

        Raises ColumnError if weights of a version are deleted, or if no step can train the trajectory.
        """
        record = await self._store.records.get(calls[0].record) if calls else None
        if record is None:
            raise StoreError(
                f"a column of {task.id} has no Record", hint="agentrl db check lists what is missing"
            )
        values = np.full(sum(len(call.output_ids) // 4 for call in calls), np.nan, np.float32)
        trained = await asyncio.to_thread(_trained_tokens, task, record, calls)
        if trained is None:
            return values, None
        data, places = trained
        if (problem := await asyncio.to_thread(self._policy.problem, data)) is not None:
            raise ColumnError(problem)
        versions = np.concatenate([np.full(span.end - span.start, span.version) for span in data.spans])
        # Look for all of them first: nothing is computed for a trajectory that lacks one.
        needed = [await self._published(version) for version in np.unique(versions).tolist()]
        images = await images_of(self._store, [data])
        for version in needed:
            async with self._turns.of(version.id):
                await self._load(version)
                # To its end also if it is cancelled: the next turn changes the weights.
                found = await to_its_end(self._compute, data, images)
            here = versions == version.id
            values[places[here]] = found[here]
        return values, None

    async def _published(self, number: int) -> PolicyVersion:
        """Return a version whose weights can be loaded. Raises ColumnError if they are nowhere."""
        version = await self._store.policy_versions.get(number)
        if version is None:
            raise ColumnError(f"policy version {number}, which sampled tokens of it, was never published")
        if version.pruned_at is not None or not version.is_stored:
            raise ColumnError(
                f"the weights of policy version {number}, which sampled tokens of it, are deleted"
                if version.is_stored else f"policy version {number} was in a trainer's memory alone"
            )  # fmt: skip
        if version.encoding == "adapter":
            raise ColumnError(f"policy version {number} is an adapter, and whole weights are computed alone")
        try:
            await chain_to(self._store, version)
        except PublishError as error:
            raise ColumnError(error.message) from error
        return version

    async def _load(self, version: PolicyVersion) -> None:
        if self._loaded == version.id:
            return
        self._loaded = None
        started = time.monotonic()
        if is_in_place(version):
            await to_its_end(self._load_in_place, version)
        else:
            # Never release it between two versions: another filler would take it to a version of its own.
            _, folder = await self._copy.hold(self._store, version)
            await to_its_end(self._policy.load, Path(folder))
        self._loaded = version.id
        logger.info("policy version %d loaded in %.1f s", version.id, time.monotonic() - started)

    def _load_in_place(self, version: PolicyVersion) -> None:
        folder = Path(version.location)
        # On another host than the trainer's, the base may be in another folder: its checksums say whether.
        if version.id == 0 and not folder.is_dir():
            folder = self._policy.base
        verify(folder, version.files)
        self._policy.load(folder)

    def _compute(self, data: DBRecordData, images: Mapping[str, Image]) -> NDArray[np.float32]:
        try:
            return self._policy.logprobs(data, images)
        except (RuntimeError, MemoryError, IndexError, ValueError) as error:
            raise ModelError(
                f"{self.name} cannot compute {data.tokens} tokens: {first_line(error)}"
            ) from error


def _trained_tokens(
    task: Task, record: Record, calls: Sequence[DispatchedSamplingTask]
) -> tuple[DBRecordData, NDArray[np.int64]] | None:
    """Return the training data of all calls that may be trained, and where their tokens are in the column.

    The places are int64[T], in order of spans. None if no call may be trained.
    """
    data = to_training_data(task, record, calls, 1.0, _ALL_CALLS)
    if data is None:
        return None
    counts = [len(call.output_ids) // 4 for call in calls]
    first = dict(zip((call.index for call in calls), np.cumsum([0, *counts]).tolist(), strict=False))
    ends = {span.call: span.end for span in data.spans}  # spans of a call ascend: the last one ends it
    length = dict(zip((call.index for call in calls), counts, strict=True))
    places = [
        first[span.call] + length[span.call] - ends[span.call] + np.arange(span.start, span.end)
        for span in data.spans
    ]
    return data, np.concatenate(places)


async def teach_self(configs: Configs, *, until_empty: bool) -> int:
    """Fill ``version_logprobs`` until a signal, or with ``until_empty`` until nothing waits; count them."""
    run, flags = configs[RunConfig], configs[TeacherConfig]
    stop = stop_on_signals()
    folder = base_folder(configs[ModelConfig])
    with retry_outages(run.db_wait_seconds, stop):
        async with await open_begun(run, stop) as store:
            configs = await as_trained(store, configs, flags.teacher_wait_seconds, stop)
            await check_run(store, configs, {}, folder)
            copy = LocalCopy(
                await weights_dir(store, configs[EngineConfig].weights_dir) / "old_logprobs", is_exact=True
            )
            policy = await asyncio.to_thread(_build, configs)
            try:
                column = TeacherColumn(
                    store=store, teaching=VersionLogprobs(store, policy, copy), column=VERSION_LOGPROBS,
                    claims=configs[ClaimConfig], until_empty=until_empty,
                )  # fmt: skip
                return await column.run(stop, flags.teacher_concurrency)
            finally:
                copy.release()
                await asyncio.to_thread(policy.close)


def _build(configs: Configs) -> PublishedPolicy:
    from agentrl.distributed.published_policy import PublishedPolicy  # torch is imported where it computes

    return PublishedPolicy(configs)


async def as_trained(store: Store, configs: Configs, seconds: float, stop: asyncio.Event) -> Configs:
    """Return ``configs`` with the numerics of the run's trainer, which is awaited for ``seconds``.

    Raises ConfigError if none has begun by then, and if the run's π_old is another one.
    """
    deadline = time.monotonic() + seconds
    while (trainer := (await store.settings.resolved()).get("train")) is None:
        if time.monotonic() >= deadline or stop.is_set():
            raise ConfigError(
                f"no trainer has begun run {store.run_name}, and its flags decide how logprobs are computed",
                hint="start agentrl train; --teacher_wait_seconds is how long it is awaited",
            )
        await asyncio.sleep(_POLL_SECONDS)
    method = trainer.values.get("old_logprobs")
    if method != "version":
        raise ConfigError(
            f"run {store.run_name} is trained with --old_logprobs {method}: no group waits for"
            f" {VERSION_LOGPROBS}",
            hint="begin a run with --old_logprobs version, or leave out --self",
        )
    known = {name: trainer.values[name] for name in _AS_TRAINED if name in trainer.values}
    logger.info("numerics of the trainer", extra=known)
    return configs.with_flags(known)
