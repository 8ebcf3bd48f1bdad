"""Measure which share of the change by training is in the published weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor

from agentrl.distributed.load_shards import Rows, read_rows
from agentrl.errors import ModelError
from agentrl.model.load import Policy
from agentrl.weights.difference import Rounding

logger = logging.getLogger(__name__)
_ROWS = 4
"""Rows of this rank's part of a weight that are compared with the base.

They are few enough that one thread computes with them: starting more threads for each weight takes longer.
"""


@dataclass
class PublishedShare:
    """Compares the trained weights, and what rounding leaves of them, with the base model.

    The whole base would have to be held or read again for each version, so rows of each weight stand for it.
    An adapter's change needs no base: it is summed over all merged weights.
    """

    policy: Policy

    @cached_property
    def _base(self) -> dict[str, Rows]:
        """The base model's rows, by parameter; its files are read once."""
        model, base = self.policy.model, self.policy.base
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        try:
            return read_rows(model, base, trained, _ROWS)
        except ModelError as error:
            logger.warning("published_update_share is not reported: %s", error.message)
            return {}

    @torch.no_grad()
    def measure(self) -> float | None:
        """Return the share of the present weights; None if nothing has changed, or the adapter travels alone.

        Every rank calls it.
        """
        policy, own = self.policy, self.policy.own_dtype
        if policy.adapter is not None:
            return None if policy.publishes_adapter else policy.adapter.rounding.take_share()
        if own is None or torch.promote_types(policy.model.dtype, own) == own:
            return 1.0
        rounding = Rounding()
        weights = dict(policy.model.named_parameters())
        for part in policy.published.parts():
            if part.name in self._base:
                rows = self._base[part.name]
                weight = weights[part.name]
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                trained = rows.of(local).float()
                base = rows.values.to(trained)
                written = trained.to(part.like.dtype).float()
                rounding.add(trained - base, written - base, local.numel() / trained.numel())
        return rounding.take_share()
