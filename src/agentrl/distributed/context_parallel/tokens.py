"""Context parallelism: which tokens of a forest each rank computes, and how ranks exchange their tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl.data.forest import Ints, TokenForest
from agentrl.model.attention.varlen import Segment, split_segments


@dataclass(frozen=True)
class RankTokens:
    """The two equal chunks of a forest's tokens that one rank computes: the r-th from either end.

    A token attends to those before it, so a cheap early chunk is paired with an expensive late one.
    """

    forest: TokenForest
    """The whole forest, padded at its end so that all chunks have the same length."""
    chunks: tuple[tuple[int, int], tuple[int, int]]

    @property
    def tokens(self) -> Ints:
        """int64[n], the indices of this rank's tokens, ascending."""
        return np.concatenate([np.arange(start, end) for start, end in self.chunks])

    def targets(self) -> tuple[Ints, Ints]:
        """Return the targets whose parent is here, as indices in [0, T), and those parents in [0, n)."""
        parent = self.forest.parent[self.forest.target]
        (first, middle), (second, end) = self.chunks
        is_late = (second <= parent) & (parent < end)
        mine = np.flatnonzero(is_late | ((first <= parent) & (parent < middle)))
        before = np.where(is_late[mine], second - (middle - first), first)
        return mine, parent[mine] - before

    def segments(self, tile: int) -> list[Segment]:
        """Return this rank's tokens as segments of the whole forest, in order.

        A segment with ancestors needs a mask, and is cut to at most ``tile`` tokens.
        """
        whole = split_segments(self.forest)
        ends = np.array([segment.end for segment in whole])
        pieces = []
        for start, end in self.chunks:
            index = int(np.searchsorted(ends, start, side="right"))
            while start < end:
                segment = whole[index]
                stop = min(end, segment.end)
                pieces += _tiles(segment, start, stop, tile)
                start, index = stop, index + 1
        return pieces


def split_tokens(forest: TokenForest, ranks: int, rank: int, *, block: int = 1) -> RankTokens:
    """Return the tokens of ``rank`` among ``ranks``, in chunks of whole ``block`` tokens."""
    length = max(1, -(-forest.tokens // (2 * ranks * block))) * block
    chunks = (rank, 2 * ranks - 1 - rank)
    first, second = ((index * length, (index + 1) * length) for index in chunks)
    return RankTokens(_padded(forest, 2 * ranks * length), (first, second))


def _padded(forest: TokenForest, tokens: int) -> TokenForest:
    """Return ``forest`` with an untrained chain behind it, ``tokens`` in all."""
    extra = tokens - forest.tokens
    if extra == 0:
        return forest
    position = np.arange(extra)
    return replace(
        forest,
        input_ids=np.pad(forest.input_ids, (0, extra)),
        position_ids=np.append(forest.position_ids, position),
        parent=np.append(forest.parent, np.where(position, forest.tokens + position - 1, -1)),
        subtree_end=np.append(forest.subtree_end, np.full(extra, tokens)),
        owner=np.append(forest.owner, np.full(extra, -1)),
    )


def _tiles(segment: Segment, start: int, end: int, tile: int) -> list[Segment]:
    """Return ``[start, end)`` of ``segment`` in tiles, each with the tokens before it as ancestors."""
    if start == segment.start and not segment.ancestors:
        return [Segment(start, end, ())]
    return [
        Segment(place, min(place + tile, end), _ancestors(segment, place))
        for place in range(start, end, tile)
    ]


def _ancestors(segment: Segment, place: int) -> tuple[tuple[int, int], ...]:
    own = ((segment.start, place),) if place > segment.start else ()
    return (*segment.ancestors, *own)


@dataclass(frozen=True)
class TokenExchange:
    """Collectives between the ranks that split a forest by ``split_tokens``; all ranks call each method."""

    group: ProcessGroup

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.group.size()

    def gather(self, local: Tensor) -> Tensor:
        """All-gather each rank's [1, heads, n, d] into [1, heads, N, d], in the forest's order."""
        parts = local.new_empty(self.ranks, *local.shape[1:])
        dist.all_gather(list(parts.chunk(self.ranks)), local.contiguous(), self.group)
        early, late = parts.chunk(2, dim=2)
        return torch.cat([*early, *late.flip(0)], dim=1)[None]

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """Reduce-scatter the ranks' ``whole`` [1, heads, N, d]: the sum over them, [1, heads, n, d] of it."""
        early, late = torch.stack(whole[0].chunk(2 * self.ranks, dim=1)).chunk(2)
        parts = torch.cat([early, late.flip(0)], dim=2)
        local = whole.new_empty(1, *parts.shape[1:])
        dist.reduce_scatter(local, list(parts.chunk(self.ranks)), dist.ReduceOp.SUM, self.group)
        return local

    def gather_with_gradient(self, *local: Tensor) -> tuple[Tensor, ...]:
        """``gather`` each tensor; gradients are summed over all ranks."""
        return cast("tuple[Tensor, ...]", _Gather.apply(self, *local))  # type: ignore[no-untyped-call]

    def join(self, part: Tensor, places: Tensor, count: int) -> Tensor:
        """Return [count] values on every rank, of which this one has ``part`` at indices ``places``.

        The gradient reaches ``part`` alone, unsummed: every rank computes the same loss of all values.
        """
        if count == 0:
            return part
        return cast(Tensor, _Join.apply(part, places, count, self.group))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: TokenExchange, *local: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.gather(tensor) for tensor in local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(ctx.exchange.scatter_sum(grad) for grad in grads))


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, places: Tensor, count: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = part.new_zeros(count)
        whole[places] = part
        dist.all_reduce(whole, dist.ReduceOp.SUM, group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0][places], None, None, None
