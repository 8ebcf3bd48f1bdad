"""Freshness at sampling: how many groups may be open, so that what is sampled is trained soon enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.config.schema import SamplingConfig, TrainConfig

if TYPE_CHECKING:
    from agentrl.store.client import Store


@dataclass(frozen=True, slots=True)
class Admission:
    """Bounds the groups that are sampled or wait to be trained.

    With at most (``max_staleness`` + 1) × ``groups_per_step`` of them open, a group that is begun now is
    trained at most ``max_staleness`` versions later.
    """

    sampling: SamplingConfig
    training: TrainConfig

    @property
    def limit(self) -> int:
        """Open groups at most."""
        ahead = 0 if self.sampling.sync_sampling else self.sampling.max_staleness
        return (ahead + 1) * self.training.groups_per_step

    async def groups_allowed(self, store: Store, engine_version: int | None) -> int:
        """How many groups may be open right now; groups already begun may always be finished.

        With ``--sync_sampling`` none is begun while a committed step's weights are not published, or no
        engine serves the newest ones yet (``engine_version``: the oldest version that an engine serves).
        """
        if not self.sampling.sync_sampling:
            return self.limit
        newest = await store.policies.latest()
        step = await store.training.last_step()
        if newest is not None and engine_version is not None and engine_version < newest.id:
            return 0
        unpublished = step is not None and (newest is None or newest.step < step.step)
        return 0 if unpublished else self.limit
