"""Read a run from a notebook or a script: a synchronous ``Store`` with trajectories, steps and tasks.

``agentrl.store.client.Store`` is the asynchronous store of the processes; it also writes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentrl.base.batches import batches
from agentrl.config.schema import RunConfig
from agentrl.documents.model_call import DispatchedSamplingTask, conversation, unpack_floats, unpack_ids
from agentrl.documents.run import Evaluation
from agentrl.documents.status import StepStatus
from agentrl.screens.views.pipelines import GroupRow, StepRow, TaskRow, TrajectoryRow
from agentrl.screens.views.read import NO_VERSION, Views, token_versions
from agentrl.store.client import Store as AsyncStore
from agentrl.store.client import open_existing

T = TypeVar("T")
_CALLS_TOGETHER = 64
"""Trajectories whose model calls one query reads."""


@dataclass(frozen=True, kw_only=True)
class Trajectory(TrajectoryRow):
    """A row of ``audit_trajectories`` with its messages and tokens.

    The arrays have one element per token, over all model calls in order. A call's prompt is stored as what
    it adds to the call before; after a context reset, the whole new prompt follows.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation: prompts, responses and tool results, in order."""
    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32), compare=False)
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32), compare=False)
    """Behavior logprobs; NaN where a token was not generated."""
    versions: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32), compare=False)
    """The policy version that generated the token; −1 where it was not generated."""


class Store:
    """A run's database, for reading. Use it as a context manager, or call ``close``.

    Every method returns a list of dataclasses: ``pandas.DataFrame(store.trajectories(step=3))`` is a table.
    """

    def __init__(self, store: AsyncStore, loop: _BackgroundLoop) -> None:
        self._store = store
        self._views = Views(store.connection)
        self._loop = loop
        self.run_name = store.run_name

    @classmethod
    def open(
        cls,
        run_name: str = "default",
        *,
        db_connection_string: str | None = None,
        mongo_dir: str = ".agentrl/mongo",
        db_timeout_seconds: float = 60.0,
    ) -> Self:
        """Open an existing run, at ``db_connection_string`` or on the embedded server under ``mongo_dir``.

        Raises ConfigError for an invalid name, and StoreError if the server is not up or has no such run.
        """
        run = RunConfig(
            run_name=run_name,
            db_connection_string=db_connection_string,
            mongo_dir=mongo_dir,
            db_timeout_seconds=db_timeout_seconds,
        )
        loop = _BackgroundLoop()
        try:
            return cls(loop.run(open_existing(run)), loop)
        except BaseException:
            loop.close()
            raise

    def trajectories(
        self,
        *,
        status: str | None = None,
        step: int | None = None,
        split: str | None = None,
        limit: int | None = None,
    ) -> list[Trajectory]:
        """Return trajectories with their messages and tokens, newest first.

        ``status`` is that of the Record, such as ``ready``; ``step`` selects what a committed step trained.
        """
        return self._loop.run(self._trajectories(status=status, step=step, split=split, limit=limit))

    def steps(self, *, status: str | None = None) -> list[StepRow]:
        """Return optimizer steps in the order of planning, of one status (such as ``committed``) or all."""
        wanted = None if status is None else StepStatus(status)
        return self._loop.run(self._views.steps(status=wanted))

    def tasks(self, *, split: str | None = None) -> list[TaskRow]:
        """Return every question that has a completed group, with its mean scores over the epochs."""
        return self._loop.run(self._views.tasks(split=split))

    def groups(self, *, split: str | None = None) -> list[GroupRow]:
        """Return every Task of every epoch with the scores of its trajectories."""
        return self._loop.run(self._views.groups(split=split))

    def evaluations(self) -> list[Evaluation]:
        """Return the run's evaluations, oldest first; ``total`` has the results of a finished one."""
        return self._loop.run(self._store.evaluations.all())

    def close(self) -> None:
        """Close the connection; calling it again does nothing."""
        if self._loop.is_running:
            self._loop.run(self._store.close())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _trajectories(
        self, *, status: str | None, step: int | None, split: str | None, limit: int | None
    ) -> list[Trajectory]:
        rows = await self._views.trajectories(status=status, step=step, split=split, limit=limit)
        trajectories: list[Trajectory] = []
        for page in batches(rows, _CALLS_TOGETHER):
            calls = await self._store.model_calls.by_records([row.id for row in page])
            trajectories += [_with_tokens(row, calls[row.id]) for row in page]
        return trajectories


class _BackgroundLoop:
    """An event loop in a thread of its own, since a notebook runs code inside its own event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentrl-store", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result. An interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _with_tokens(row: TrajectoryRow, calls: Sequence[DispatchedSamplingTask]) -> Trajectory:
    token_ids, logprobs, versions = [], [], []
    for call in calls:
        prompt, output = unpack_ids(call.context_ids), unpack_ids(call.output_ids)
        token_ids += [prompt, output]
        logprobs += [np.full(len(prompt), np.nan, np.float32), unpack_floats(call.logprobs)]
        versions += [np.full(len(prompt), NO_VERSION, np.int32), token_versions(call, len(output))]
    return Trajectory(
        **{item.name: getattr(row, item.name) for item in fields(row)},
        messages=conversation(calls),
        token_ids=_joined(token_ids, np.int32),
        logprobs=_joined(logprobs, np.float32),
        versions=_joined(versions, np.int32),
    )


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
