"""Write and read how weights differ from the version before: exact, and idempotent.

A file holds the new values of the elements whose bits changed, never differences: applying it twice does no
harm. It consists of ``MAGIC``; zstd frames; the index, one zstd frame of JSON; and the length of that frame
in 8 bytes, little-endian. The index is ``{name: {"dtype", "shape", "chunks"}}`` of the tensors that changed.
Their elements are counted in row-major order and cut into chunks of ``CHUNK``; a changed chunk is the list
``[number, changed, width, offset, sizes]``: how many elements changed, the bytes of a gap, where its frames
begin in the file, and the bytes of each frame. A gap is the number of unchanged elements before a changed
one. There is one frame for each byte of the gaps and then of the values, lowest byte first: the high bytes
of gaps and the exponents of values compress well, and would not beside the others. Width 0: all elements of
the chunk are stored, without gaps.

The last part measures how far two sets of weights lie apart, and how much of a change rounding leaves. torch
is imported where it is used: samplers import this module too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

from agentrl.documents.run import FileChecksum
from agentrl.errors import ModelError, PublishError
from agentrl.weights.folder import (
    TensorChecksum,
    dtype_code,
    new_checksum,
    raw,
    read_header,
    tensor_files,
)

if TYPE_CHECKING:
    from torch import Tensor


MAGIC = b"AGENTRL delta 1\n"
SUFFIX = ".delta"
CHUNK = 1 << 20
"""Elements of a chunk: small enough to stay in a core's cache between comparing, hashing and copying."""
_LEVEL = 1
LENGTH = struct.Struct("<Q")
"""Of the index, and of the header of a safetensors file."""
_GAPS = (0, 1, 2, 4)
"""Widths of a gap, in bytes."""
WORDS = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
"""Elements are compared and copied as integers: NaN and −0.0 are values too."""
_EncodedChunk = tuple[int, int, int, list[bytes]]
"""Number, stored elements, width of a gap, frames."""
_MAX_INDEX_BYTES = 1 << 27
"""A chunk takes some 80 bytes of it; as Python's objects the index is twenty times as large."""


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """What ``encode`` wrote, and the checksums of all current tensors, changed or not."""

    file: FileChecksum
    tensors: dict[str, TensorChecksum]
    changed: int
    """Elements that changed."""
    elements: int
    """All elements."""


def encode(
    previous: Mapping[str, Tensor], current: Mapping[str, Tensor], file: Path, threads: int = 1
) -> EncodedDelta:
    """Write the elements of ``current`` that differ from ``previous`` into ``file``; compare their bits.

    Both map the tensors' names in the model's files to tensors on the CPU. One pass over the current ones
    compares and hashes. Raises PublishError if the names, dtypes or shapes differ: publish whole weights
    then. Raises OSError if the file cannot be written.
    """
    if previous.keys() != current.keys():
        raise _other_tensors(min(previous.keys() ^ current.keys()))
    index: dict[str, dict[str, Any]] = {}
    checksums: dict[str, TensorChecksum] = {}
    changed = elements = 0
    with file.open("xb") as stream, ThreadPoolExecutor(threads) as pool:
        digest = hashlib.sha256()

        def write(block: bytes) -> None:
            digest.update(block)
            stream.write(block)

        write(MAGIC)
        names = list(current)
        encoded = pool.map(lambda name: _encode_tensor(name, previous[name], current[name]), names)
        for name, (checksum, parts, count) in zip(names, encoded, strict=True):
            checksums[name] = checksum
            changed, elements = changed + count, elements + math.prod(checksum.shape)
            chunks = []
            for number, stored, width, frames in parts:
                chunks.append([number, stored, width, stream.tell(), [len(frame) for frame in frames]])
                write(b"".join(frames))
            if chunks:
                index[name] = {"dtype": checksum.dtype, "shape": list(checksum.shape), "chunks": chunks}
        packed = zstandard.compress(json.dumps(index, separators=(",", ":")).encode(), _LEVEL)
        write(packed + LENGTH.pack(len(packed)))
        written = FileChecksum(name=file.name, bytes=stream.tell(), sha256=digest.hexdigest())
    return EncodedDelta(written, checksums, changed, elements)


def _encode_tensor(
    name: str, previous: Tensor, current: Tensor
) -> tuple[TensorChecksum, list[_EncodedChunk], int]:
    if (previous.dtype, previous.shape) != (current.dtype, current.shape):
        raise _other_tensors(name)
    word = WORDS[current.element_size()]
    before, after = raw(previous).view(word), raw(current).view(word)
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    digest = new_checksum()
    chunks, changed = [], 0
    for number, start in enumerate(range(0, after.size, CHUNK)):
        old, new = before[start : start + CHUNK], after[start : start + CHUNK]
        digest.update(new.data)
        positions = np.flatnonzero(old != new).astype(np.uint32)
        count = positions.size
        if not count:
            continue
        changed += count
        if 2 * count > new.size:  # a gap takes about a byte then, as much as it saves
            count, width, planes = new.size, 0, _planes(new)
        else:
            gaps = positions.copy()
            gaps[1:] -= positions[:-1] + 1
            largest = int(gaps.max())
            width = next(size for size in _GAPS[1:] if largest < 1 << 8 * size)
            planes = [*_planes(gaps.astype(WORDS[width])), *_planes(new.take(positions))]
        chunks.append((number, count, width, [compressor.compress(plane) for plane in planes]))
    checksum = TensorChecksum(dtype_code(current), tuple(current.shape), digest.hexdigest())
    return checksum, chunks, changed


def _planes(words: NDArray[Any]) -> list[bytes]:
    """Return the lowest bytes of all words, then the second lowest ones, and so on."""
    return [plane.tobytes() for plane in words.view(np.uint8).reshape(-1, words.itemsize).T]


@dataclass(frozen=True, slots=True)
class StoredShape:
    """How a delta's tensor is to look: the dtype as safetensors files name it, and the shape."""

    dtype: str
    shape: tuple[int, ...]
    word: np.dtype[Any]
    """The integers of an element's size."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class DeltaChunk:
    """The changed elements of one chunk of a tensor, as the index describes them."""

    changed: int
    width: int
    offset: int
    sizes: tuple[int, ...]
    word: np.dtype[Any]
    length: int
    """Elements of the tensor that it covers, changed or not."""


class DeltaFile:
    """A file that ``encode`` wrote. Whatever it holds, reading it raises PublishError or is safe."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._path, self._descriptor = path, stream.fileno()
        self._size = size = os.fstat(self._descriptor).st_size
        try:
            (length,) = LENGTH.unpack(self._read(size - LENGTH.size, LENGTH.size))
            if self._read(0, len(MAGIC)) != MAGIC or length > size:
                raise ValueError("it is another format, or incomplete")
            packed = self._read(size - LENGTH.size - length, length)
            if zstandard.frame_content_size(packed) > _MAX_INDEX_BYTES:
                raise ValueError(f"its index has more than {_MAX_INDEX_BYTES:,} bytes")
            self.index: dict[str, Any] = json.loads(zstandard.decompress(packed))
            # Call it: JSON may be a list or a number, which has none.
            self.index.keys()
        except (ValueError, AttributeError, RecursionError, OSError, zstandard.ZstdError) as error:
            raise self._damaged(str(error)) from error

    def changes(self, name: str, like: StoredShape) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return which elements of a tensor change, counted in row-major order, and their values as integers.

        Raises PublishError if the tensor in the file is another than ``like``.
        """
        positions, values = [], []
        for number, chunk in self.chunks(name, like).items():
            at, new = self.read(chunk)
            at += number * CHUNK
            positions.append(at)
            values.append(new)
        return np.concatenate(positions), np.concatenate(values)

    def chunks(self, name: str, like: StoredShape) -> dict[int, DeltaChunk]:
        """Return the changed chunks of a tensor by number. Raises PublishError if it is not like ``like``."""
        try:
            entry = self.index[name]
            if (entry["dtype"], tuple(entry["shape"])) != (like.dtype, like.shape):
                raise ValueError(f"{name} is not {like.dtype} {list(like.shape)}")
            chunks: dict[int, DeltaChunk] = {}
            for number, changed, width, offset, sizes in entry["chunks"]:
                # Compare types: isinstance takes true for an int, and 1e999 is an infinite float.
                if any(type(value) is not int for value in (number, changed, width, offset, *sizes)):
                    raise ValueError(f"a number of {name} is not an integer")
                length = min(CHUNK, like.elements - number * CHUNK)
                chunks[number] = DeltaChunk(changed, width, offset, tuple(sizes), like.word, length)
            if not chunks:
                raise ValueError(f"{name} has no chunks")
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(str(error)) from error
        for number, chunk in chunks.items():
            fits = number >= 0 and 0 < chunk.changed <= chunk.length and chunk.width in _GAPS
            fits = fits and (chunk.width > 0 or chunk.changed == chunk.length)
            if not fits or len(chunk.sizes) != chunk.width + like.word.itemsize:
                raise self._damaged(f"chunk {number} of {name} does not fit {list(like.shape)}")
        return chunks

    def read(self, chunk: DeltaChunk) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the positions in a chunk that change, and their values. PublishError if they do not fit."""
        try:
            planes, offset, decompressor = [], 0, zstandard.ZstdDecompressor()
            frames = memoryview(self._read(chunk.offset, sum(chunk.sizes)))
            for size in chunk.sizes:
                frame = frames[offset : offset + size]
                # The frame names its size itself, and decompressing would allocate that much.
                if zstandard.frame_content_size(frame) != chunk.changed:
                    raise ValueError(f"a frame does not hold {chunk.changed} bytes")
                planes.append(np.frombuffer(decompressor.decompress(frame), np.uint8))
                offset += size
        except (ValueError, OSError, zstandard.ZstdError) as error:
            raise self._damaged(str(error)) from error
        values = _from_planes(planes[chunk.width :], chunk.word)
        if not chunk.width:
            return np.arange(chunk.length), values
        gaps = _from_planes(planes[: chunk.width], WORDS[chunk.width])
        # Sum in int64: NumPy would sum in uint64, to which arange's int64 cannot be added in place.
        positions = np.cumsum(gaps, dtype=np.int64)
        positions += np.arange(gaps.size)
        if positions[-1] >= chunk.length:
            raise self._damaged(f"it changes element {positions[-1]} of a chunk of {chunk.length}")
        return positions, values

    def _read(self, offset: int, size: int) -> bytes:
        is_inside = 0 <= offset <= offset + size <= self._size  # before memory is allocated for it
        # Read by offset: threads share the descriptor, and would share its position.
        found = os.pread(self._descriptor, size, offset) if is_inside else b""
        if not is_inside or len(found) != size:
            raise ValueError(f"it does not hold the bytes {offset} to {offset + size}")
        return found

    def _damaged(self, why: str) -> PublishError:
        return PublishError(f"{self._path} is damaged or does not fit: {why}")


def _from_planes(planes: Sequence[NDArray[np.uint8]], word: np.dtype[Any]) -> NDArray[Any]:
    return np.stack(planes, axis=1).reshape(-1).view(word)


def _other_tensors(name: str) -> PublishError:
    return PublishError(
        f"tensor {name} is not in both versions with one dtype and shape: there is no delta between them",
        hint="publish whole weights",
    )


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """The distance of two sets of weights in one layer; both are Euclidean norms."""

    layer: str
    """``layer 3``, or the name of a tensor outside the layers."""
    difference: float
    norm: float
    """Of the first set."""

    @property
    def relative(self) -> float:
        """``difference`` as a share of ``norm``."""
        return self.difference / self.norm if self.norm else 0.0


@dataclass
class Rounding:
    """Sums over this rank's weights: Δ², and Δ times the change that is left after rounding."""

    whole: float = 0.0
    kept: float = 0.0

    def add(self, delta: Tensor, written: Tensor, times: float = 1.0) -> None:
        """Add a layer: its Δ, and the difference that the rounded weights make.

        A sample stands for ``times`` as many weights.
        """
        import torch
        from torch.distributed.tensor import DTensor

        delta, written = (each.to_local() if isinstance(each, DTensor) else each for each in (delta, written))
        self.whole += times * float((delta * delta).sum(dtype=torch.float64))
        self.kept += times * float((delta * written).sum(dtype=torch.float64))

    def take_share(self) -> float | None:
        """Return the share of Δ that is left on all ranks, about 0 to 1, and reset; None without a Δ.

        Every rank calls it.
        """
        import torch.distributed as dist

        sums = [(self.whole, self.kept)]
        if dist.is_initialized():
            sums *= dist.get_world_size()
            dist.all_gather_object(sums, (self.whole, self.kept))
        self.whole = self.kept = 0.0
        whole, kept = (sum(column) for column in zip(*sums, strict=True))
        return kept / whole if whole else None


def layer_differences(first: Path, second: Path) -> list[LayerDifference]:
    """Compare the ``.safetensors`` files of two folders, one tensor at a time.

    Raises ModelError for folders with other tensors or that cannot be read.
    """
    names = _names(first)
    if names.keys() != (other := _names(second)).keys():
        unknown = sorted(names.keys() ^ other.keys())
        raise ModelError(f"{first} and {second} hold other tensors, {unknown[0]} among them")
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, file in names.items():
        one, two = _read_tensor(file, name), _read_tensor(other[name], name)
        if one.shape != two.shape:
            raise ModelError(
                f"{name} has the shape {list(one.shape)} in {first}, and {list(two.shape)} in {second}"
            )
        found = _LAYER.search(name)
        total = sums[f"layer {found[1]}" if found else name]
        total[0] += float((one - two).square().sum())
        total[1] += float(one.square().sum())
    return [
        LayerDifference(layer, math.sqrt(apart), math.sqrt(norm)) for layer, (apart, norm) in sums.items()
    ]


def _names(folder: Path) -> dict[str, Path]:
    """Return {tensor: file}, layers in order of their number."""
    found = {name: file for file in tensor_files(folder) for name in read_header(file)}
    if not found:
        raise ModelError(f"{folder} holds no weights: no file *.safetensors")

    def place(name: str) -> tuple[int, str]:
        layer = _LAYER.search(name)
        return int(layer[1]) if layer else -1, name

    return {name: found[name] for name in sorted(found, key=place)}


def _read_tensor(file: Path, name: str) -> Tensor:
    from safetensors import safe_open  # samplers import this module on machines without it

    with safe_open(file, "pt") as content:
        tensor: Tensor = content.get_tensor(name)
    return tensor.double()
