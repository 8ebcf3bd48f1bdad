"""Read what the pages of a run share, each part cached for as long as it stays true."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request

from agentrl.config.run import EngineListConfig
from agentrl.dashboard.cache import cache_of
from agentrl.documents.evaluation import Evaluation
from agentrl.documents.outage import Outage
from agentrl.documents.run import RunSettings, TrainerLease
from agentrl.documents.status import TrainerEnd
from agentrl.store.client import Store
from agentrl.store.services import Liveness
from agentrl.store.views.failures import Failures
from agentrl.store.views.overview import Overview, StepPoint
from agentrl.store.views.rows import EngineRow, FailureCount

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
    """split → status → Records."""
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
    cache, overview = cache_of(request), Overview(store.connection)
    name = store.run_name
    configurations = await cache.get(("configurations", name), _SLOW_SECONDS, store.settings.resolved)

    async def read_failures() -> list[FailureCount]:
        failures = Failures(store.connection)
        return [*await failures.attempts(), *await failures.groups()]

    reads = asyncio.gather(
        asyncio.gather(
            read_steps(request, store),
            overview.planned(),
            store.services.liveness(TRAIN, _alive_seconds(configurations)),
            store.trainer_lease.read(),
            cache.get(("engines", name), _COUNT_SECONDS, store.views.engines),
        ),
        asyncio.gather(
            cache.get(("tasks", name), _COUNT_SECONDS, overview.tasks, stale=_STALE_SECONDS),
            cache.get(("records", name), _COUNT_SECONDS, overview.records, stale=_STALE_SECONDS),
            cache.get(("data", name), _COUNT_SECONDS, overview.data, stale=_STALE_SECONDS),
            overview.quarantined_because(),
        ),
        asyncio.gather(
            cache.get(("failures", name), _SLOW_SECONDS, read_failures, stale=_STALE_SECONDS),
            store.outages.past(_PAST_OUTAGES),
            cache.get(("evaluations", name), _COUNT_SECONDS, store.evaluations.all),
            cache.get(("settings", name), _SLOW_SECONDS, store.settings.all),
        ),
    )
    (
        (steps, planned, liveness, lease, engines),
        counts,
        (failures, outages, evaluations, settings),
    ) = await reads
    tasks, records, data, problem = counts
    return RunData(
        steps=steps,
        planned=planned,
        tasks=tasks,
        records=records,
        data=data,
        quarantined_because=problem,
        failures=failures,
        liveness=liveness,
        engines=engines,
        lease=lease,
        past_outages=outages,
        evaluations=evaluations,
        settings=settings,
        configurations=configurations,
    )


def _alive_seconds(configurations: Sequence[RunSettings]) -> float:
    """Return the age of a heartbeat above which an engine of the run is dead."""
    for configuration in configurations:
        seconds = configuration.values.get("heartbeat_seconds")
        if isinstance(seconds, int | float) and seconds > 0:
            return EngineListConfig(heartbeat_seconds=float(seconds)).alive_seconds
    return EngineListConfig().alive_seconds
