"""The routing of a forest's tokens: read from training data, joined with trees, merged with prefixes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.routing import ExpertShape, Routing, unpack_routing
from agentrl.documents.training import DBRecordData

logger = logging.getLogger(__name__)

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ForestRouting:
    """The experts that engines chose for N tokens."""

    experts: Routing
    """[N, layers, k], −1 where a token routes freely."""
    merged: int = 0
    """Tokens with experts of their own that prefix merging has replaced by an equal token."""
    differing: int = 0
    """Those of them whose experts were others."""

    @property
    def tokens(self) -> int:
        """The number of tokens with experts."""
        return int((self.experts[:, 0, 0] >= 0).sum())

    def select(self, tokens: Ints | NDArray[np.bool_]) -> ForestRouting:
        """Return the routing of ``tokens``; counts stay with the whole forest."""
        return ForestRouting(self.experts[tokens])

    def padded(self, extra: int) -> ForestRouting:
        """Return the routing with ``extra`` free tokens behind it."""
        return ForestRouting(np.pad(self.experts, ((0, extra), (0, 0), (0, 0)), constant_values=-1))

    def merge(self, source: Ints, new_index: Ints) -> ForestRouting:
        """Return the routing of a forest in which token i is ``source[i]`` of this one.

        ``new_index`` int64[N] is the new place of each token. The first token with experts at a place gives
        them: a place is computed once, and has one routing.
        """
        has_experts = self.experts[:, 0, 0] >= 0
        given = np.flatnonzero(has_experts)
        kept = source.copy()
        places, first = np.unique(new_index[given], return_index=True)
        free = ~has_experts[source[places]]
        kept[places[free]] = given[first[free]]
        experts = self.experts[kept]
        replaced = given[kept[new_index[given]] != given]
        differ = np.any(experts[new_index[replaced]] != self.experts[replaced], axis=(1, 2))
        return ForestRouting(experts, self.merged + len(replaced), self.differing + int(differ.sum()))


def routing_of(data: DBRecordData, shape: ExpertShape | None, new_index: Ints) -> ForestRouting | None:
    """Return the routing of training data whose token i becomes ``new_index[i]``; None without any.

    A routing of another shape or length is logged and left out: its tokens route freely.
    """
    if shape is None or not data.routing:
        return None
    try:
        stored = unpack_routing(data.routing, shape)
        if len(stored) != data.tokens:
            raise ValueError(f"a routing of {len(stored)} tokens for {data.tokens}")
    except ValueError as error:
        logger.warning("training data %s are trained with the trainer's own routing: %s", data.id, error)
        return None
    experts = np.empty_like(stored)
    experts[new_index] = stored
    return ForestRouting(experts)


def concatenate_routing(
    routings: Sequence[ForestRouting | None], tokens: Sequence[int]
) -> ForestRouting | None:
    """Return the routing of forests of ``tokens`` tokens in one; tokens of forests without any are free."""
    known = [routing for routing in routings if routing is not None]
    if not known:
        return None
    free = known[0].experts[:0]
    parts = [
        (ForestRouting(free).padded(count) if routing is None else routing).experts
        for routing, count in zip(routings, tokens, strict=True)
    ]
    return ForestRouting(
        np.concatenate(parts), sum(each.merged for each in known), sum(each.differing for each in known)
    )
