"""Column: values of a Record's tokens that another process fills in, such as the logprobs of a teacher."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.base import Root, now
from agentrl.documents.sampling_mask import SamplingMask
from agentrl.documents.status import ColumnStatus
from agentrl.errors import StoreError

Floats = NDArray[np.float32]

_LEAST = -100.0
"""Logprob below which an id has no probability in float32. Engines write -inf, -1e5 or -9999 for one."""
_ABOVE_ZERO = 1e-3
"""Rounding that a logprob may have."""
_LARGEST_ID = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Root):
    """The values of one name for all generated tokens of one Record. ``id`` is ``record/name``.

    A group is finalized when every column that its rules name is filled or given up. ``attempt`` counts the
    claims: writes of an earlier claim are refused.
    """

    id: str
    record: str
    task: str
    split: str
    name: str
    filler: str = ""
    """The filler that may claim it, such as the name of a teacher; empty: any."""
    status: ColumnStatus = ColumnStatus.OPEN
    owner: str | None = None
    lease_expires_at: datetime | None = None
    attempt: int = 0
    failures: int = 0
    """Claims that ended with a failure that counts."""
    not_before: datetime | None = None
    problem: str | None = None
    """Why the last attempt failed."""
    by: str | None = None
    """What filled it, such as the model of the teacher."""
    created_at: datetime = field(default_factory=now)
    filled_at: datetime | None = None
    values: bytes = b""
    """float32[generated tokens of the Record], model calls by index; NaN: the filler has no value."""
    top: bytes = b""
    """The TopLogprobs of the same tokens; empty: none."""


def column_key(record: str, name: str) -> str:
    """Return the ``_id`` of a Record's column."""
    return f"{record}/{name}"


def checked_logprobs(values: Sequence[float | None]) -> Floats:
    """Return logprobs as float32, at least -100. Raises ValueError for NaN, None, and one above 0."""
    found = np.array(values, np.float64)
    wrong = found[~(found <= _ABOVE_ZERO)]
    if wrong.size:
        raise ValueError(f"a logprob of {wrong[0]}")
    return found.clip(_LEAST, 0.0).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The most likely ids of n tokens' distributions and their logprobs; a token may have none."""

    ids: SamplingMask
    """The ids of each token, ascending."""
    logprobs: NDArray[np.float16]
    """float16[K], in nats, one for each of ``ids.ids``."""

    @classmethod
    def of(cls, rows: Sequence[Mapping[int, float]]) -> Self:
        """Build it from {id: logprob} of each token, without the ids that have no probability.

        Raises ValueError for NaN, a logprob above 0, and an id that is negative or has more than 31 bits.
        """
        checked_logprobs([logprob for row in rows for logprob in row.values()])
        for id in (id for row in rows for id in row if not 0 <= id <= _LARGEST_ID):
            raise ValueError(f"a token id of {id}")
        kept = [{id: value for id, value in row.items() if value >= _LEAST} for row in rows]
        ordered = [row[id] for row in kept for id in sorted(row)]
        return cls(SamplingMask.of([list(row) for row in kept]), np.array(ordered, np.float16))

    @classmethod
    def join(cls, parts: Sequence[TopLogprobs]) -> Self:
        """Concatenate at least one."""
        return cls(
            SamplingMask.join([part.ids for part in parts]), np.concatenate([p.logprobs for p in parts])
        )

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    def select(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> TopLogprobs:
        """Return those of the chosen tokens."""
        return TopLogprobs(self.ids.select(chosen), self.logprobs[self.ids.places(chosen)])

    def pack(self) -> bytes:
        """Return the number of ids as uint32, their logprobs as float16, and ``ids.pack()``; b"" for none."""
        if not len(self.logprobs):
            return b""
        count = len(self.logprobs).to_bytes(4, "little")
        return count + self.logprobs.astype("<f2").tobytes() + self.ids.pack()

    @classmethod
    def unpack(cls, data: bytes, tokens: int) -> Self:
        """Return the inverse of ``pack`` for ``tokens`` tokens. Raises StoreError for other bytes."""
        count = int.from_bytes(data[:4], "little")
        ids = SamplingMask.unpack(data[4 + 2 * count :], tokens)
        if len(ids.ids) != count:
            raise StoreError(f"top logprobs of {len(data)} bytes have {len(ids.ids)} ids, not {count}")
        return cls(ids, np.frombuffer(data, "<f2", count, 4).astype(np.float16))


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Columns of the same n tokens, by name."""

    values: Mapping[str, Floats]
    """float32[n] each; NaN: the token has no value."""
    top: Mapping[str, TopLogprobs] = field(default_factory=dict)
    """Of the columns that have any."""

    @classmethod
    def of_record(cls, columns: Iterable[Column], tokens: int) -> Self:
        """Return filled columns of the ``tokens`` generated tokens of a Record. Raises StoreError."""
        values: dict[str, Floats] = {}
        top: dict[str, TopLogprobs] = {}
        for column in columns:
            if len(column.values) != 4 * tokens:
                raise StoreError(
                    f"column {column.id} has {len(column.values) // 4} values, and its Record has {tokens}"
                    " generated tokens",
                    hint="the filler read other model calls: agentrl db reopen --failure_kind column",
                )
            values[column.name] = np.frombuffer(column.values, "<f4")
            if column.top:
                top[column.name] = TopLogprobs.unpack(column.top, tokens)
        return cls(values, top)

    @classmethod
    def join(cls, parts: Sequence[tuple[TokenColumns | None, int]]) -> TokenColumns | None:
        """Concatenate (columns, tokens) pairs; None if no part has any. Missing values are NaN."""
        present = [part for part, _ in parts if part is not None]
        if not present:
            return None
        values = {
            name: np.concatenate([_values(part, name, tokens) for part, tokens in parts])
            for name in sorted({name for part in present for name in part.values})
        }
        top = {
            name: TopLogprobs.join([_top(part, name, tokens) for part, tokens in parts])
            for name in sorted({name for part in present for name in part.top})
        }
        return TokenColumns(values, top)

    def select(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> TokenColumns:
        """Return those of the chosen tokens."""
        return TokenColumns(
            {name: values[chosen] for name, values in self.values.items()},
            {name: top.select(chosen) for name, top in self.top.items()},
        )

    def pack(self) -> bytes:
        """Return a header line, {name: bytes of top}, then the values and the top of each; b"" for none.

        Equal columns have equal bytes.
        """
        if not self.values:
            return b""
        header: dict[str, int] = {}
        pieces: list[bytes] = []
        for name in sorted(self.values):
            top = self.top.get(name)
            packed = b"" if top is None else top.pack()
            header[name] = len(packed)
            pieces += [self.values[name].astype("<f4").tobytes(), packed]
        return json.dumps(header).encode() + b"\n" + b"".join(pieces)

    @classmethod
    def unpack(cls, data: bytes, tokens: int) -> Self | None:
        """Return the columns of ``tokens`` tokens, None without any. Raises StoreError for other bytes."""
        if not data:
            return None
        values: dict[str, Floats] = {}
        top: dict[str, TopLogprobs] = {}
        line, _, rest = data.partition(b"\n")
        try:
            for name, size in json.loads(line).items():
                values[name] = np.frombuffer(rest, "<f4", tokens).astype(np.float32)
                packed, rest = rest[4 * tokens : 4 * tokens + size], rest[4 * tokens + size :]
                if packed:
                    top[name] = TopLogprobs.unpack(packed, tokens)
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(f"columns of {len(data)} bytes are not those of {tokens} tokens") from error
        if rest:
            raise StoreError(f"columns of {tokens} tokens have {len(rest)} bytes too many")
        return cls(values, top)


def _values(part: TokenColumns | None, name: str, tokens: int) -> Floats:
    found = None if part is None else part.values.get(name)
    return np.full(tokens, np.nan, np.float32) if found is None else found


def _top(part: TokenColumns | None, name: str, tokens: int) -> TopLogprobs:
    found = None if part is None else part.top.get(name)
    return TopLogprobs.of([{}] * tokens) if found is None else found
