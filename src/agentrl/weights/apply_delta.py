"""Apply deltas to the safetensors files of a model folder, in place, and verify the result."""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentrl.errors import ModelError, PublishError, first_line
from agentrl.weights.delta import CHUNK, LENGTH, WORDS, Chunk, DeltaFile, StoredShape
from agentrl.weights.folder import read_header
from agentrl.weights.tensor_checksums import TensorChecksum, new_checksum


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
        opened = [DeltaFile(files.enter_context(path.open("rb")), path) for path in deltas]
        places = _places(folder)
        names = sorted({name for delta in opened for name in delta.index})
        lacking = next((name for name in names if name not in places), None)
        if lacking is not None:
            raise PublishError(f"{folder} has no tensor {lacking}, which {deltas[-1]} changes")
        patches = {
            name: [(delta, delta.chunks(name, places[name])) for delta in opened if name in delta.index]
            for name in names
        }
        unknown = TensorChecksum("", (), "")
        found = pool.map(
            lambda name: _change_tensor(places[name], patches[name], expected.get(name, unknown)), names
        )
        for name, checksum in zip(names, found, strict=True):
            if checksum != expected.get(name):
                raise PublishError(
                    f"tensor {name} in {folder} differs from what was published: expected "
                    f"{expected.get(name)}, found {checksum}"
                )
    return names


@dataclass(frozen=True, slots=True)
class _InFile(StoredShape):
    """Where the bytes of a tensor are in a safetensors file."""

    file: Path
    offset: int


def _places(folder: Path) -> dict[str, _InFile]:
    places = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                begin = LENGTH.size + LENGTH.unpack(stream.read(LENGTH.size))[0]
            for name, entry in read_header(file).items():
                start, end = entry["data_offsets"]
                elements = math.prod(entry["shape"])
                word = WORDS[(end - start) // max(elements, 1) or 1]
                if elements * word.itemsize != end - start or begin + end > file.stat().st_size:
                    raise ValueError(f"its tensor {name} is incomplete")
                places[name] = _InFile(entry["dtype"], tuple(entry["shape"]), word, file, begin + start)
        except (ModelError, ValueError, KeyError, TypeError, struct.error) as error:
            raise PublishError(f"{file} is not a safetensors file: {first_line(error)}") from error
    return places


def _change_tensor(
    place: _InFile, patches: Sequence[tuple[DeltaFile, Mapping[int, Chunk]]], expected: TensorChecksum
) -> TensorChecksum:
    digest = new_checksum(expected.checksum)
    descriptor = os.open(place.file, os.O_RDWR)
    try:
        for number, start in enumerate(range(0, place.elements, CHUNK)):
            data = np.empty(min(CHUNK, place.elements - start), place.word)
            offset = place.offset + start * place.word.itemsize
            # Not mapped: a full disk and a truncated file are errors here, and SIGBUS there.
            read = os.preadv(descriptor, [data.data], offset)
            changes = [(delta, chunks[number]) for delta, chunks in patches if number in chunks]
            for delta, chunk in changes:
                positions, values = delta.read(chunk)
                data[positions] = values
            digest.update(data.data)
            written = os.pwrite(descriptor, data.data, offset) if changes else read
            if not read == written == data.nbytes:
                raise PublishError(f"{place.file} could not be changed at byte {offset}")
    finally:
        os.close(descriptor)
    return TensorChecksum(place.dtype, place.shape, digest.hexdigest())
