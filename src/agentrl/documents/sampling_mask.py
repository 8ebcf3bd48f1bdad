"""The ids that top-p, top-k and min-p left each token to be sampled from, packed in about two bytes an id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import StoreError

LARGEST: Final = 4000
"""Most ids that a token's mask may keep: a request for masks has this as its largest ``top_k``."""

_BITS, _MORE = 7, 0x80
"""Bits of a number in each byte, and the bit that says that another byte follows."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """The kept ids of n tokens; a token that keeps 0 ids was sampled from the whole vocabulary."""

    counts: NDArray[np.int64]
    """int64[n], how many ids each token keeps."""
    ids: NDArray[np.int64]
    """int64[sum of counts], token after token, ascending within a token."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Self:
        """Build it from the ids of each token, in any order."""
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.concatenate([np.zeros(0, np.int64), *(np.asarray(row, np.int64) for row in rows)])
        return cls(counts, ids[np.lexsort((ids, np.repeat(np.arange(len(rows)), counts)))])

    @classmethod
    def join(cls, masks: Sequence[SamplingMask]) -> Self:
        """Concatenate at least one mask."""
        return cls(np.concatenate([m.counts for m in masks]), np.concatenate([m.ids for m in masks]))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.counts)

    def select(self, chosen: NDArray[np.bool_] | NDArray[np.int64] | slice) -> SamplingMask:
        """Return the mask of the chosen tokens."""
        return SamplingMask(self.counts[chosen], self.ids[self.places(chosen)])

    def places(self, chosen: NDArray[np.bool_] | NDArray[np.int64] | slice) -> NDArray[np.int64]:
        """Return the indexes in ``ids`` of the ids that the chosen tokens keep."""
        counts = self.counts[chosen]
        shift = (np.cumsum(self.counts) - self.counts)[chosen] - (np.cumsum(counts) - counts)
        return np.repeat(shift, counts) + np.arange(counts.sum())

    def keeps(self, tokens: NDArray[np.integer]) -> bool:
        """Return whether every token, int[n], is among the ids that it was sampled from."""
        if len(tokens) != len(self):
            return False
        row = np.repeat(np.arange(len(self)), self.counts)
        found = np.bincount(row[self.ids == tokens[row]], minlength=len(self))
        return bool(np.all((found == 1) | (self.counts == 0)))

    def pack(self) -> bytes:
        """Return the counts, then each token's ids as gaps, as variable-length numbers of 7 bits a byte.

        Empty if no token keeps fewer ids than the vocabulary. Equal masks have equal bytes.
        """
        if not self.ids.size:
            return b""
        gaps = np.diff(self.ids, prepend=0)
        first = (np.cumsum(self.counts) - self.counts)[self.counts > 0]
        gaps[first] = self.ids[first]
        return _encode(np.concatenate([self.counts, gaps]))

    @classmethod
    def unpack(cls, data: bytes, tokens: int) -> Self:
        """Return the mask of ``tokens`` tokens; inverse of ``pack``. Raises StoreError for other bytes."""
        if not data:
            return cls(np.zeros(tokens, np.int64), np.zeros(0, np.int64))
        numbers = _decode(data)
        counts, gaps = numbers[:tokens], numbers[tokens:]
        if len(counts) < tokens or counts.sum() != len(gaps):
            raise StoreError(f"a sampling mask of {len(data)} bytes is not one of {tokens} tokens")
        first = (np.cumsum(counts) - counts)[counts > 0]
        total = np.cumsum(gaps)
        return cls(counts, total - np.repeat(total[first] - gaps[first], counts[counts > 0]))


def _encode(numbers: NDArray[np.int64]) -> bytes:
    length = np.ones_like(numbers)
    for bits in range(_BITS, 32, _BITS):
        length += numbers >= 1 << bits
    start = np.cumsum(length) - length
    data = np.zeros(int(length.sum()), np.uint8)
    for place in range(int(length.max(initial=0))):
        has = length > place
        more = np.where(length[has] > place + 1, _MORE, 0)
        data[start[has] + place] = (numbers[has] >> _BITS * place) & (_MORE - 1) | more
    return data.tobytes()


def _decode(data: bytes) -> NDArray[np.int64]:
    values = np.frombuffer(data, np.uint8).astype(np.int64)
    last = np.flatnonzero(values < _MORE)
    if not last.size or last[-1] != len(values) - 1:
        raise StoreError(f"a sampling mask of {len(data)} bytes ends within a number")
    start = np.concatenate([[0], last[:-1] + 1])
    place = np.arange(len(values)) - np.repeat(start, np.diff(last, prepend=-1))
    if place.max() > 4:
        raise StoreError(f"a sampling mask of {len(data)} bytes has a number of more than 32 bits")
    return np.add.reduceat((values & (_MORE - 1)) << _BITS * place, start)
