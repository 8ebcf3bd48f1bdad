"""Freshness at sampling: how many groups may be open, so that what is sampled is trained soon enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.config.schema import SamplingConfig, TrainConfig
from agentrl.store.openings import Room

if TYPE_CHECKING:
    from agentrl.store.client import Store


@dataclass(frozen=True, slots=True)
class Admission:
    """Bounds the groups that are sampled or wait to be trained.

    Groups are trained in the order in which they were begun. With at most (``max_staleness`` + 1) ×
    ``groups_per_step`` of them open, the step in progress included, a group that is begun under the newest
    weights is trained at most ``max_staleness`` versions later. An engine that serves older weights uses up
    that allowance by as many versions as it lags.
    """

    sampling: SamplingConfig
    training: TrainConfig

    @property
    def max_staleness(self) -> int:
        """Versions that sampling may run ahead: none with ``--sync_sampling``."""
        return 0 if self.sampling.sync_sampling else self.sampling.max_staleness

    async def groups_allowed(self, store: Store, engine_version: int | None) -> Room:
        """How many groups may be open after the last step; groups already begun may always be finished.

        ``engine_version`` is the oldest version that an engine serves; None counts as the newest.
        """
        newest = await store.policies.latest()
        step = await store.training.last_step()
        published = newest.id if newest is not None else 0
        is_unpublished = step is not None and (newest is None or newest.step < step.step)
        serving = published if engine_version is None else min(engine_version, published)
        engines_lag = published - serving
        lag = engines_lag + int(is_unpublished)
        groups = max(0, self.max_staleness + 1 - lag) * self.training.groups_per_step
        return Room(groups, after_step=0 if step is None else step.step, engines_lag=engines_lag > 0)
