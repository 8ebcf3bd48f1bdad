"""Freshness at sampling: how many groups may be open, so that what is sampled is trained soon enough."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.config.schema import SamplingConfig, TrainConfig
from agentrl.store.admission import GroupLimit

if TYPE_CHECKING:
    from agentrl.store.client import Store


@dataclass(frozen=True, slots=True)
class Admission:
    """Bounds the groups that are sampled or wait to be trained.

    Groups are trained in the order in which they were begun. With at most (``max_staleness`` + 1) ×
    ``groups_per_step`` of them open, the step in progress included, a group that is begun under the weights
    of the last step is trained at most ``max_staleness`` steps later. Weights that are not published yet, and
    an engine that serves older ones, use up that allowance by as many optimizer steps as they lag.
    """

    sampling: SamplingConfig
    training: TrainConfig

    @property
    def max_staleness(self) -> int:
        """Optimizer steps that sampling may run ahead: none with ``--sync_sampling``."""
        return 0 if self.sampling.sync_sampling else self.sampling.max_staleness

    async def groups_allowed(self, store: Store, engine_versions: Collection[int]) -> GroupLimit:
        """How many groups may be open after the last step; groups already begun may always be finished.

        ``engine_versions`` are those that engines serve; none counts as the newest. The one of the earliest
        step counts: after a resume it may not be the one of the lowest number.
        """
        newest = await store.policy_versions.latest()
        step = await store.training.last_step()
        trained = 0 if step is None else step.step
        published = 0 if newest is None else newest.step
        served = published
        for version in engine_versions:
            if newest is not None and version < newest.id:
                serving = await store.policy_versions.get(version)
                served = min(served, 0 if serving is None else serving.step)
        lag = max(trained, published) - served
        groups = max(0, self.max_staleness + 1 - lag) * self.training.groups_per_step
        return GroupLimit(groups, after_step=trained, engines_lag=served < published)
