"""Context parallelism: which tokens of a forest each process of a group computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from agentrl.data.forest import Ints, TokenForest
from agentrl.model.attention.varlen import Segment, split_segments


@dataclass(frozen=True)
class TokenShare:
    """Two equal chunks of a forest's tokens: the r-th from either end, for the r-th process of a group.

    A token sees those before it, so that early chunks cost little attention and late ones much.
    """

    forest: TokenForest
    """The whole, with padding behind it so that all chunks are equally long."""
    chunks: tuple[tuple[int, int], tuple[int, int]]

    @property
    def tokens(self) -> Ints:
        """int64[n], the indices of this process's tokens, ascending."""
        return np.concatenate([np.arange(start, end) for start, end in self.chunks])

    def targets(self) -> tuple[Ints, Ints]:
        """Where the trainable tokens whose parent is here lie in [0, T), and their parents in [0, n)."""
        parent = self.forest.parent[self.forest.target]
        (first, middle), (second, end) = self.chunks
        is_late = (second <= parent) & (parent < end)
        mine = np.flatnonzero(is_late | ((first <= parent) & (parent < middle)))
        before = np.where(is_late[mine], second - (middle - first), first)
        return mine, parent[mine] - before

    def segments(self, tile: int) -> list[Segment]:
        """This process's tokens as segments of the whole forest, in order.

        Those that have ancestors, and so need a mask, have at most ``tile`` tokens.
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


def share_tokens(forest: TokenForest, ranks: int, rank: int, *, block: int = 1) -> TokenShare:
    """The tokens of ``rank`` among ``ranks``, in chunks that are whole numbers of ``block`` tokens."""
    length = max(1, -(-forest.tokens // (2 * ranks * block))) * block
    chunks = (rank, 2 * ranks - 1 - rank)
    first, second = ((index * length, (index + 1) * length) for index in chunks)
    return TokenShare(_padded(forest, 2 * ranks * length), (first, second))


def _padded(forest: TokenForest, tokens: int) -> TokenForest:
    """``forest`` and, behind it, one tree without branches that nothing is trained on."""
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
    """``[start, end)`` of ``segment``, and what lies before in it as ancestors."""
    if start == segment.start and not segment.ancestors:
        return [Segment(start, end, ())]
    return [
        Segment(place, min(place + tile, end), _ancestors(segment, place))
        for place in range(start, end, tile)
    ]


def _ancestors(segment: Segment, place: int) -> tuple[tuple[int, int], ...]:
    own = ((segment.start, place),) if place > segment.start else ()
    return (*segment.ancestors, *own)
