"""Keep the weights of a version in memory, as a sealed safetensors file that other processes of the user map.

The file is a ``memfd``: it has no name, needs no room in ``/dev/shm``, and is gone when the last process that
uses it has ended, however it ends. Engines reach it as ``/proc/PID/fd/N`` of the trainer.
"""

from __future__ import annotations

import fcntl
import io
import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.multiprocessing
from torch import Tensor

from agentrl.errors import ModelError, PublishError, first_line
from agentrl.weights.folder import read_header
from agentrl.weights.tensor_checksums import file_header, raw, torch_dtype

PREFIX = "agentrl-weights-"
"""Of the names of memory files, as /proc shows them."""
_PATH = re.compile(r"/proc/\d+/fd/\d+")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: bytes ``[begin, end)`` of its data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class MemoryFile:
    """A mapped file: its tensors in the order of their bytes, and the bytes."""

    tensors: tuple[StoredTensor, ...]
    data: Tensor
    """uint8[bytes of all tensors]."""

    def named(self) -> dict[str, Tensor]:
        """Return the tensors by name, without a copy."""
        return {item.name: unflatten(item, self.data[item.begin : item.end]) for item in self.tensors}

    def buckets(self, limit: int) -> Iterator[tuple[StoredTensor, ...]]:
        """Yield the tensors in groups of neighbours, of at most ``limit`` bytes or one tensor each."""
        group: list[StoredTensor] = []
        for item in self.tensors:
            if group and item.end - group[0].begin > limit:
                yield tuple(group)
                group = []
            group.append(item)
        if group:
            yield tuple(group)

    def pickled(self, bucket: tuple[StoredTensor, ...]) -> tuple[Tensor, bytes]:
        """Copy a bucket into shared memory; return it, and the ``flattened_bucket`` by which SGLang finds it.

        Keep the first until SGLang has answered. The pickle needs ``file_system`` sharing: with descriptors,
        which are torch's default, the server would have to authenticate as a child of this process.
        """
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        first, end = bucket[0].begin, bucket[-1].end
        shared = torch.empty(0, dtype=torch.uint8)
        shared.set_(torch.UntypedStorage._new_shared(end - first))  # type: ignore[no-untyped-call]
        shared.copy_(self.data[first:end])
        metadata = [
            SimpleNamespace(
                name=item.name, shape=torch.Size(item.shape), dtype=item.dtype,
                start_idx=item.begin - first, end_idx=item.end - first, numel=item.end - item.begin,
            )
            for item in bucket
        ]  # fmt: skip
        written = io.BytesIO()
        ForkingPickler(written).dump({"flattened_tensor": shared, "metadata": metadata})
        return shared, written.getvalue()


def unflatten(item: StoredTensor, flat: Tensor) -> Tensor:
    """Return the bytes ``flat``, uint8, as the tensor ``item``, without a copy."""
    return flat.view(item.dtype).view(item.shape)


def write_memory_file(name: str, tensors: Mapping[str, Tensor]) -> int:
    """Write ``tensors``, on the CPU, into a new memory file and seal it; return its descriptor.

    Raises PublishError if memory is short.
    """
    names, start = file_header(tensors)
    descriptor = os.memfd_create(PREFIX + name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as stream:
            stream.write(start)
            for name in names:
                stream.write(raw(tensors[name]).data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise PublishError(
            f"{sum(tensor.nbytes for tensor in tensors.values()):,} bytes of weights do not fit into memory:"
            f" {error.strerror}",
            hint="use --weight_sync disk, or a machine with more memory",
        ) from error
    return descriptor


def open_memory_file(path: str, name: str) -> MemoryFile:
    """Map the memory file ``name``. Raises PublishError if it is gone, or not a sealed file of this user.

    The number of a descriptor is used again, the name is not. Another path is refused, so that a caller can
    make an engine read nothing else.
    """
    try:
        if not _PATH.fullmatch(path):
            raise ValueError("it is not /proc/PID/fd/N")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from error
    try:
        own = f"/proc/self/fd/{descriptor}"
        is_own = os.fstat(descriptor).st_uid == os.geteuid()
        if os.readlink(own) != f"/memfd:{PREFIX}{name} (deleted)" or not is_own:
            raise ValueError(f"it does not hold the weights {name} of this user any more")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("it can still be written")
        header = read_header(Path(own))
        ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        tensors = tuple(
            StoredTensor(name, torch_dtype(entry["dtype"]), tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in ordered
        )
        (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)  # torch wants a writable buffer
        data = torch.frombuffer(mapped, dtype=torch.uint8)[8 + length :]
        for item in tensors:
            if item.end - item.begin != math.prod(item.shape) * item.dtype.itemsize or item.end > len(data):
                raise ValueError(f"the size of {item.name} is wrong")
    except (OSError, ValueError, KeyError, TypeError, ModelError, PublishError) as error:
        raise _unusable(path, error) from error
    finally:
        os.close(descriptor)
    return MemoryFile(tensors, data)


def _unusable(path: str, error: Exception) -> PublishError:
    return PublishError(
        f"the weights in the trainer's memory, {path}, cannot be read: {first_line(error)}",
        hint="run the trainer and the engine as one user, on one host and in one container",
    )
