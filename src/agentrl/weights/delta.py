"""Encode how weights differ from the version before, and apply it to a model folder: exact, and idempotent.

A file holds the new values of the elements whose bits changed, never differences: applying it twice does no
harm. It consists of ``MAGIC``; zstd frames; the index, one zstd frame of JSON; and the length of that frame
in 8 bytes, little-endian. The index is ``{name: {"dtype", "shape", "chunks"}}`` of the tensors that changed.
Their elements are counted in row-major order and cut into chunks of ``CHUNK``; a changed chunk is the list
``[number, changed, width, offset, sizes]``: how many elements changed, the bytes of a gap, where its frames
begin in the file, and the bytes of each frame. A gap is the number of unchanged elements before a changed
one. There is one frame for each byte of the gaps and then of the values, lowest byte first: the high bytes
of gaps and the exponents of values compress well, and would not beside the others. Width 0: all elements of
the chunk are stored, without gaps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

from agentrl.documents.run import FileChecksum
from agentrl.errors import PublishError
from agentrl.weights.folder import read_header
from agentrl.weights.tensor_checksums import TensorChecksum, dtype_code, raw

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = b"AGENTRL delta 1\n"
SUFFIX = ".delta"
CHUNK = 1 << 20
"""Elements of a chunk: small enough to stay in a core's cache between comparing, hashing and copying."""
_LEVEL = 1
_LENGTH = struct.Struct("<Q")
_GAPS = (0, 1, 2, 4)
"""Widths of a gap, in bytes."""
_WORDS = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
"""Elements are compared and copied as integers: NaN and −0.0 are values too."""
_EncodedChunk = tuple[int, int, int, list[bytes]]
"""Number, stored elements, width of a gap, frames."""
_MAX_INDEX_BYTES = 1 << 30


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
        write(packed + _LENGTH.pack(len(packed)))
        written = FileChecksum(name=file.name, bytes=stream.tell(), sha256=digest.hexdigest())
    return EncodedDelta(written, checksums, changed, elements)


def _encode_tensor(
    name: str, previous: Tensor, current: Tensor
) -> tuple[TensorChecksum, list[_EncodedChunk], int]:
    if (previous.dtype, previous.shape) != (current.dtype, current.shape):
        raise _other_tensors(name)
    word = _WORDS[current.element_size()]
    before, after = raw(previous).view(word), raw(current).view(word)
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    digest = hashlib.sha256()
    chunks, changed = [], 0
    for number, start in enumerate(range(0, after.size, CHUNK)):
        old, new = before[start : start + CHUNK], after[start : start + CHUNK]
        digest.update(new.data)
        positions = np.flatnonzero(old != new)
        count = positions.size
        if not count:
            continue
        changed += count
        if 2 * count > new.size:  # a gap takes about a byte then, as much as it saves
            count, width, planes = new.size, 0, _planes(new)
        else:
            gaps = np.diff(positions, prepend=-1) - 1
            width = next(size for size in _GAPS[1:] if gaps.max() < 1 << 8 * size)
            planes = [*_planes(gaps.astype(_WORDS[width])), *_planes(new[positions])]
        chunks.append((number, count, width, [compressor.compress(plane) for plane in planes]))
    checksum = TensorChecksum(dtype_code(current), tuple(current.shape), digest.hexdigest())
    return checksum, chunks, changed


def _planes(words: NDArray[Any]) -> list[bytes]:
    """Return the lowest bytes of all words, then the second lowest ones, and so on."""
    return [plane.tobytes() for plane in words.view(np.uint8).reshape(-1, words.itemsize).T]


def apply(
    deltas: Sequence[Path], folder: Path, expected: Mapping[str, TensorChecksum], threads: int = 2
) -> list[str]:
    """Write the values of ``deltas``, oldest first, into the safetensors files of ``folder``, in place.

    Each changed tensor is read, changed, hashed and written once, a chunk at a time. Return the names of the
    changed tensors. Raises PublishError if a delta is damaged or does not fit the folder, or if a tensor then
    differs from ``expected``, the checksums of the last delta's version; the folder holds neither version
    then. Raises OSError if a file cannot be read or written.
    """
    with contextlib.ExitStack() as files, ThreadPoolExecutor(threads) as pool:
        opened = [_Delta(files.enter_context(path.open("rb")), path) for path in deltas]
        places = _places(folder)
        names = sorted({name for delta in opened for name in delta.index})
        patches = {
            name: [(delta, delta.chunks(name, places)) for delta in opened if name in delta.index]
            for name in names
        }
        found = pool.map(lambda name: _change_tensor(places[name], patches[name]), names)
        for name, checksum in zip(names, found, strict=True):
            if checksum != expected.get(name):
                raise PublishError(
                    f"tensor {name} in {folder} differs from what was published: expected "
                    f"{expected.get(name)}, found {checksum}"
                )
    return names


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the bytes of a tensor are in a safetensors file."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    word: np.dtype[Any]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def _places(folder: Path) -> dict[str, _Place]:
    places = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                begin = _LENGTH.size + _LENGTH.unpack(stream.read(_LENGTH.size))[0]
            for name, entry in read_header(file).items():
                start, end = entry["data_offsets"]
                elements = math.prod(entry["shape"])
                word = _WORDS[(end - start) // max(elements, 1) or 1]
                if elements * word.itemsize != end - start or begin + end > file.stat().st_size:
                    raise ValueError(f"its tensor {name} is incomplete")
                places[name] = _Place(file, begin + start, entry["dtype"], tuple(entry["shape"]), word)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise PublishError(f"{file} is not a safetensors file: {error}") from error
    return places


def _change_tensor(place: _Place, patches: Sequence[tuple[_Delta, Mapping[int, _Chunk]]]) -> TensorChecksum:
    digest = hashlib.sha256()
    descriptor = os.open(place.file, os.O_RDWR)
    try:
        for number, start in enumerate(range(0, place.elements, CHUNK)):
            data = np.empty(min(CHUNK, place.elements - start), place.word)
            offset = place.offset + start * place.word.itemsize
            # Not mapped: a full disk and a truncated file are errors here, and SIGBUS there.
            read = os.preadv(descriptor, [data.data], offset)
            changes = [(delta, chunks[number]) for delta, chunks in patches if number in chunks]
            for delta, chunk in changes:
                delta.change(data, chunk)
            digest.update(data.data)
            written = os.pwrite(descriptor, data.data, offset) if changes else read
            if not read == written == data.nbytes:
                raise PublishError(f"{place.file} could not be changed at byte {offset}")
    finally:
        os.close(descriptor)
    return TensorChecksum(place.dtype, place.shape, digest.hexdigest())


@dataclass(frozen=True, slots=True)
class _Chunk:
    changed: int
    width: int
    offset: int
    sizes: tuple[int, ...]


class _Delta:
    """A file that ``encode`` wrote. Whatever it holds, reading it raises PublishError or is safe."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._path, self._descriptor = path, stream.fileno()
        size = os.fstat(self._descriptor).st_size
        try:
            (length,) = _LENGTH.unpack(self._read(size - _LENGTH.size, _LENGTH.size))
            if self._read(0, len(MAGIC)) != MAGIC or length > size:
                raise ValueError("it is another format, or incomplete")
            packed = self._read(size - _LENGTH.size - length, length)
            if zstandard.frame_content_size(packed) > _MAX_INDEX_BYTES:
                raise ValueError(f"its index has more than {_MAX_INDEX_BYTES:,} bytes")
            self.index: dict[str, Any] = json.loads(zstandard.decompress(packed))
            self.index.keys()
        except (ValueError, AttributeError, OSError, struct.error, zstandard.ZstdError) as error:
            raise self._damaged(str(error)) from error

    def chunks(self, name: str, places: Mapping[str, _Place]) -> dict[int, _Chunk]:
        """Return the changed chunks of a tensor by number. Raises PublishError if they do not fit it."""
        place = places.get(name)
        try:
            entry = self.index[name]
            if place is None or (entry["dtype"], tuple(entry["shape"])) != (place.dtype, place.shape):
                raise ValueError(f"the folder has {place} for {name}")
            chunks = {
                int(number): _Chunk(int(changed), int(width), int(offset), tuple(map(int, sizes)))
                for number, changed, width, offset, sizes in entry["chunks"]
            }
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(str(error)) from error
        for number, chunk in chunks.items():
            length = min(CHUNK, place.elements - number * CHUNK)
            fits = number >= 0 and 0 < chunk.changed <= length and (chunk.width or chunk.changed == length)
            if not fits or len(chunk.sizes) != chunk.width + place.word.itemsize or chunk.width not in _GAPS:
                raise self._damaged(f"chunk {number} of {name} does not fit {place}")
        return chunks

    def change(self, data: NDArray[Any], chunk: _Chunk) -> None:
        """Write the values of a chunk into ``data``. Raises PublishError if they do not fit."""
        try:
            planes, offset = [], chunk.offset
            for size in chunk.sizes:
                planes.append(self._plane(self._read(offset, size), chunk.changed))
                offset += size
        except (ValueError, OSError, zstandard.ZstdError) as error:
            raise self._damaged(str(error)) from error
        values = _from_planes(planes[chunk.width :], data.dtype)
        if not chunk.width:
            data[:] = values
            return
        gaps = _from_planes(planes[: chunk.width], _WORDS[chunk.width])
        positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if positions[-1] >= data.size:
            raise self._damaged(f"it changes element {positions[-1]} of a chunk of {data.size}")
        data[positions] = values

    def _plane(self, frame: bytes, size: int) -> NDArray[np.uint8]:
        # The frame names its size itself, and decompressing would allocate that much.
        if zstandard.frame_content_size(frame) != size:
            raise ValueError(f"a frame does not hold {size} bytes")
        return np.frombuffer(zstandard.decompress(frame), np.uint8)

    def _read(self, offset: int, size: int) -> bytes:
        found = os.pread(self._descriptor, size, offset)
        if len(found) != size:
            raise ValueError(f"it ends before byte {offset + size}")
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
