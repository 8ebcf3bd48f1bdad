"""The experts that a mixture's routers chose for each token, packed in pieces that join without unpacking.

A piece is a header and the experts of consecutive tokens. Its bytes never change once an engine's answer is
packed: model calls and training data hold the same ones, so that they compare equal on every machine.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Routing = NDArray[np.signedinteger]
"""int8 or int16 [tokens, layers, top_k], ascending along the last axis; −1: the token routes freely."""

_HEADER: Final = struct.Struct("<IIHHBI")
"""Tokens, how many of the first are left out, layers, top_k, bytes of an expert, bytes that follow."""
_FAST = 1
"""zlib's level: higher ones save 2 % and take three times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Size of a model's routing. ``layers`` counts all decoder layers: engines return dense ones as zeros."""

    layers: int
    top_k: int
    experts: int

    @property
    def per_token(self) -> int:
        """Return the experts of one token."""
        return self.layers * self.top_k


def pack_routing(routing: NDArray[np.integer]) -> bytes:
    """Return a piece for the experts [tokens, layers, top_k] of consecutive tokens.

    The order of a token's experts has no meaning, because their weights are computed again: they are stored
    as differences of ascending indices, which compress to about 0.7 of a byte per expert of 128.
    """
    ascending = np.sort(routing, axis=-1)
    itemsize = 1 if ascending.max(initial=0) < 256 else 2
    gaps = np.diff(ascending, axis=-1, prepend=0).astype(f"<u{itemsize}")
    data = zlib.compress(gaps.tobytes(), _FAST)
    return _HEADER.pack(len(gaps), 0, *gaps.shape[1:], itemsize, len(data)) + data


def free_routing(tokens: int) -> bytes:
    """Return a piece for tokens that route freely."""
    return _HEADER.pack(tokens, 0, 0, 0, 1, 0) if tokens else b""


def routed_tokens(packed: bytes) -> int:
    """Return the number of tokens in all pieces. Raises ValueError for bytes that are not pieces."""
    return sum(tokens - skipped for tokens, skipped, *_ in _pieces(packed))


def without_first(packed: bytes) -> bytes:
    """Return the pieces without their first token."""
    tokens, skipped, *rest = _HEADER.unpack_from(packed)
    return _HEADER.pack(tokens, skipped + 1, *rest) + packed[_HEADER.size :]


class TreeRouting:
    """Joins the routing of model calls along a token tree, in the order in which their tokens are added."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._tokens = 0
        self._is_empty = True

    def add(self, routing: bytes, start: int, tokens: int, has_parent: bool, is_next: bool) -> None:
        """Add a call whose own tokens are ``[start, start + tokens)``; leave out a routing of another length.

        A call with a parent has computed the parent's last token too. ``is_next``: that one is token
        ``start`` − 1. Otherwise an earlier branch follows the parent, and has its routing.
        """
        if not routing or routed_tokens(routing) != tokens - 1 + has_parent:
            return
        follows = has_parent and is_next
        self._fill(start - follows)
        self._pieces.append(without_first(routing) if has_parent and not is_next else routing)
        self._tokens = start + tokens - 1
        self._is_empty = False

    def finish(self, tokens: int) -> bytes:
        """Return the routing of all ``tokens`` tokens; empty if no call has one."""
        self._fill(tokens)
        return b"" if self._is_empty else b"".join(self._pieces)

    def _fill(self, end: int) -> None:
        self._pieces.append(free_routing(end - self._tokens))
        self._tokens = end


def unpack_routing(packed: bytes, shape: ExpertShape) -> Routing:
    """Return the experts of each token, −1 for a token that routes freely.

    So does a token for which a layer of the mixture has not k different experts: the engine has not captured
    it. A layer without any token that has is dense. Raises ValueError for bytes that are not pieces, and for
    a routing of another shape.
    """
    kind = np.int8 if shape.experts <= 128 else np.int16
    found = [np.empty((0, shape.layers, shape.top_k), kind)]
    for tokens, skipped, layers, top_k, itemsize, data in _pieces(packed):
        if not data:
            found.append(np.full((tokens - skipped, shape.layers, shape.top_k), -1, kind))
            continue
        if (layers, top_k) != (shape.layers, shape.top_k):
            raise ValueError(
                f"a routing of {layers} layers with {top_k} experts a token, not {shape.layers} with"
                f" {shape.top_k}"
            )
        try:
            gaps = np.frombuffer(zlib.decompress(data), f"<u{itemsize}").reshape(tokens, layers, top_k)
        except zlib.error as error:
            raise ValueError(f"a routing that cannot be decompressed: {error}") from error
        gaps = gaps[skipped:]
        experts = np.cumsum(gaps, axis=-1, dtype=np.int32)
        if experts.max(initial=0) >= shape.experts:
            raise ValueError(f"expert {experts.max()} of {shape.experts}")
        differ = np.all(gaps[..., 1:] > 0, axis=2)
        is_sparse = np.any(differ, axis=0)
        captured = np.all(differ[:, is_sparse], axis=1) & np.any(differ, axis=1)
        found.append(np.where(captured[:, None, None], experts, -1).astype(kind))
    return np.concatenate(found)


def _pieces(packed: bytes) -> Iterator[tuple[int, int, int, int, int, bytes]]:
    """Yield (tokens, skipped, layers, top_k, bytes of an expert, data) of each piece."""
    at = 0
    while at < len(packed):
        if len(packed) - at < _HEADER.size:
            raise ValueError(f"a routing of {len(packed)} bytes ends in a header")
        tokens, skipped, layers, top_k, itemsize, length = _HEADER.unpack_from(packed, at)
        at += _HEADER.size
        if skipped > tokens or itemsize not in (1, 2) or length > len(packed) - at:
            raise ValueError(f"a routing of {len(packed)} bytes has a malformed header")
        yield tokens, skipped, layers, top_k, itemsize, packed[at : at + length]
        at += length
