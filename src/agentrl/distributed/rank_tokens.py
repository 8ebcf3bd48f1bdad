"""Split the tokens of a forest over the ranks of context parallelism, each with the same attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from agentrl.data.forest import Ints, TokenForest
from agentrl.model.attention.sdpa import Segment, split_segments


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
        routing=None if forest.routing is None else forest.routing.padded(extra),
    )


def _tiles(segment: Segment, start: int, end: int, tile: int) -> list[Segment]:
    """Return ``[start, end)`` of ``segment`` in tiles, each with the tokens before it as ancestors."""
    if start == segment.start and not segment.ancestors:
        return [Segment(start, end, ())]
    tiles = []
    for first in range(start, end, tile):
        own = ((segment.start, first),) if first > segment.start else ()
        tiles.append(Segment(first, min(first + tile, end), (*segment.ancestors, *own)))
    return tiles
