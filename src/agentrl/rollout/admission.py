"""Limit how many groups may be open, so that samples are trained before they are stale."""

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
    """Limit the groups that are being sampled or wait to be trained.

    Groups are trained in the order in which they began. With at most (``max_staleness`` + 1) ×
    ``groups_per_step`` groups open, including the step in progress, a group that begins with the newest
    weights is trained at most ``max_staleness`` steps later. Unpublished weights, and engines that serve
    older ones, reduce this limit by the number of optimizer steps that they lag. ``oversample_groups`` more
    may be open, so that a step does not wait for the slowest groups. Groups that miss their step may become
    stale.
    """

    sampling: SamplingConfig
    training: TrainConfig

    @property
    def max_staleness(self) -> int:
        """Return how many optimizer steps sampling may run ahead: 0 with ``--sync_sampling``."""
        return 0 if self.sampling.sync_sampling else self.sampling.max_staleness

    async def groups_allowed(self, store: Store, engine_versions: Collection[int]) -> GroupLimit:
        """Return how many groups may be open after the last step. Groups that have begun may always finish.

        ``engine_versions`` are the versions that engines serve; with none, the newest counts. The version of
        the earliest step decides: after a resume, that need not be the lowest number.
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
        if groups:
            groups += self.sampling.oversample_groups
        return GroupLimit(groups, after_step=trained, engines_lag=served < published)
