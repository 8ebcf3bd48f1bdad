"""Pack token arrays as bytes: int32 ids, float32 logprobs and float16 statistics, little-endian."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack_ids(ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Return the int32 bytes of token ids."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> NDArray[np.int32]:
    """Return int32[n] ids; inverse of ``pack_ids``."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


def pack_floats(values: Sequence[float] | NDArray[np.float32]) -> bytes:
    """Return the float32 bytes of logprobs."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_floats(data: bytes) -> NDArray[np.float32]:
    """Return float32[n] values; inverse of ``pack_floats``."""
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


def pack_halves(values: NDArray[np.float32]) -> bytes:
    """Return the float16 bytes of ``values``; numbers beyond ±65504 become ±65504."""
    limit = np.finfo(np.float16).max
    return np.clip(values, -limit, limit).astype("<f2").tobytes()


def unpack_halves(data: bytes) -> NDArray[np.float32]:
    """Return float32[n] values; inverse of ``pack_halves``."""
    return np.frombuffer(data, dtype="<f2").astype(np.float32)
