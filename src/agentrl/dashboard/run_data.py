"""Read what several pages share: the state of a run and the list of runs, each part cached for seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request

from agentrl.config.run import EngineListConfig
from agentrl.dashboard.cache import cache_of
from agentrl.dashboard.stores import pool_of
from agentrl.documents.evaluation import Evaluation
from agentrl.documents.outage import Outage
from agentrl.documents.run import RunSettings, TrainerLease
from agentrl.documents.status import TrainerEnd
from agentrl.store.client import Store
from agentrl.store.services import Liveness
from agentrl.store.views.failures import Failures
from agentrl.store.views.overview import Overview, StepPoint
from agentrl.store.views.rows import EngineRow, FailureCount
from agentrl.store.views.runs import Runs, RunSummary

_COUNT_SECONDS = 3.0
_SLOW_SECONDS = 10.0
_STALE_SECONDS = 30.0
_PAST_OUTAGES = 5
TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything that the overview of a run shows."""

    steps: Sequence[StepPoint]
    """The committed ones, oldest first."""
    planned: StepPoint | None
    tasks: Mapping[str, Mapping[str, int]]
    """split → status → Tasks."""
    records: Mapping[str, Mapping[str, int]]
    """split → status as people read it (``SHOWN_STATUSES``) → Records."""
    data: Mapping[str, int]
    """status → training data."""
    quarantined_because: str | None
    failures: Sequence[FailureCount]
    liveness: Liveness
    engines: Sequence[EngineRow]
    lease: TrainerLease
    past_outages: Sequence[Outage]
    evaluations: Sequence[Evaluation]
    """Oldest first."""
    settings: Sequence[RunSettings]
    configurations: Sequence[RunSettings]

    @property
    def trainer_alive(self) -> bool:
        """Whether a trainer holds the lease, by the server's clock."""
        return self.lease.is_held(self.liveness.at)

    @property
    def finished(self) -> bool:
        """Whether the last trainer reached ``--max_steps`` or the end of the data."""
        return not self.trainer_alive and self.lease.ended is TrainerEnd.FINISHED

    def flag(self, name: str) -> Any:
        """Return the value of a flag in the first stored configuration that has it; None without one."""
        for configuration in self.configurations:
            if configuration.values.get(name) is not None:
                return configuration.values[name]
        return None


async def read_steps(request: Request, store: Store) -> list[StepPoint]:
    """Return the committed steps, oldest first. Only new ones are read: a committed step is final.

    A trainer that resumes from a checkpoint undoes steps; then all are read again.
    """
    key = ("steps", store.run_name)
    known = cast("list[StepPoint] | None", cache_of(request).peek(key)) or []

    async def read() -> list[StepPoint]:
        overview = Overview(store.connection)
        if known:
            newer = await overview.steps(after=known[-1].step - 1)
            if newer and newer[0].id == known[-1].id:
                return [*known[:-1], *newer]
        return await overview.steps()

    return await cache_of(request).get(key, 0.5, read)


async def read_run(request: Request, store: Store) -> RunData:
    """Return the state of the run."""
    cache, overview, failures = cache_of(request), Overview(store.connection), Failures(store.connection)

    def cached(
        name: str, seconds: float, read: Callable[[], Awaitable[Any]], stale: float = 0.0
    ) -> Awaitable[Any]:
        return cache.get((name, store.run_name), seconds, read, stale=stale)

    async def read_failures() -> list[FailureCount]:
        attempts, groups = await asyncio.gather(failures.attempts(), failures.groups())
        return [*attempts, *groups]

    configurations = await cached("configurations", _SLOW_SECONDS, store.settings.resolved)
    reads: dict[str, Awaitable[Any]] = {
        "steps": read_steps(request, store),
        "planned": overview.planned(),
        "liveness": store.services.liveness(TRAIN, _alive_seconds(configurations)),
        "lease": store.trainer_lease.read(),
        "engines": cached("engines", _COUNT_SECONDS, store.views.engines),
        "tasks": cached("tasks", _COUNT_SECONDS, overview.tasks, _STALE_SECONDS),
        "records": cached("records", _COUNT_SECONDS, overview.records, _STALE_SECONDS),
        "data": cached("data", _COUNT_SECONDS, overview.data, _STALE_SECONDS),
        "quarantined_because": overview.quarantined_because(),
        "failures": cached("failures", _SLOW_SECONDS, read_failures, _STALE_SECONDS),
        "past_outages": store.outages.past(_PAST_OUTAGES),
        "evaluations": cached("evaluations", _COUNT_SECONDS, store.evaluations.all),
        "settings": cached("settings", _SLOW_SECONDS, store.settings.all),
    }
    values = await asyncio.gather(*reads.values())
    return RunData(**dict(zip(reads, values, strict=True)), configurations=configurations)


async def read_runs(request: Request, seconds: float) -> list[RunSummary]:
    """Return every run of the server, read anew if it was read more than ``seconds`` ago."""

    async def read() -> list[RunSummary]:
        connection = await pool_of(request).server()
        return await Runs(connection).all(EngineListConfig().alive_seconds)

    return await cache_of(request).get("runs", seconds, read)


def _alive_seconds(configurations: Sequence[RunSettings]) -> float:
    """Return the age of a heartbeat above which an engine of the run is dead."""
    for configuration in configurations:
        seconds = configuration.values.get("heartbeat_seconds")
        if isinstance(seconds, int | float) and seconds > 0:
            return EngineListConfig(heartbeat_seconds=float(seconds)).alive_seconds
    return EngineListConfig().alive_seconds
