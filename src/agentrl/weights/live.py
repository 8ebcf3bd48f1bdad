"""Hand a version to engines without a disk: in sealed memory files, or over process groups of two.

A memory file is a ``memfd``: it has no name, needs no room in ``/dev/shm``, and is gone when the last process
that uses it has ended, however it ends. Engines reach it as ``/proc/PID/fd/N`` of the trainer.

For a group, the trainer runs a ``TCPStore``. ``agentrl serve`` finds its address in the version's document,
asks there for a version, and lets its engine join the group and receive. A group of its own for each engine
lets an engine die or join at any time. It is kept between versions, and made again after a failure.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import math
import mmap
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from agentrl.base.processes import identify
from agentrl.documents.run import LiveKind, LiveShare, LiveWeights
from agentrl.errors import ConfigError, ModelError, PublishError, first_line
from agentrl.weights.folder import file_header, raw, read_header, torch_dtype

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
        # Write through a duplicate: closing the last descriptor, as the stream does, deletes the file.
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
        # Insist on seals: a file that shrinks while it is mapped ends its reader by SIGBUS.
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


logger = logging.getLogger(__name__)

GroupBackend = Literal["gloo", "nccl"]
BUCKET_BYTES = 256 << 20
"""Bytes that are sent at a time: the engine receives them into one buffer."""
JOIN_SECONDS = 60.0
_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.02
_RATE = 20e6
"""Bytes per second of a transfer, at least; a slower one is given up."""
_MOST_GROUPS = 64
_GROUP = re.compile(r"[0-9a-f]{32}")


def join_group(store: Any, name: str, rank: int, backend: GroupBackend) -> Any:
    """Join the group ``name`` of two, and wait up to ``JOIN_SECONDS`` for the other; RuntimeError otherwise.

    The prefixes are those of SGLang's ``init_custom_process_group``: its own, that of the group and that of
    the device. The group stands beside torch's default group, which training may use.
    """
    limit = timedelta(seconds=JOIN_SECONDS)
    device = "cuda" if backend == "nccl" else "cpu"
    keys = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    group: Any
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        group = dist.ProcessGroupNCCL(keys, rank, 2, options)
    else:
        group = dist.ProcessGroupGloo(keys, rank, 2, timeout=limit)
    group._set_sequence_number_for_group()
    return group


def connect(host: str, port: int) -> Any:
    """Return a client of the trainer's store. Raises PublishError if it cannot be reached."""
    limit = timedelta(seconds=_ANSWER_SECONDS)
    try:
        # A store tries again for the whole time where nobody listens.
        socket.create_connection((host, port), _ANSWER_SECONDS).close()
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    except (OSError, RuntimeError, ValueError) as error:
        raise PublishError(f"the trainer's weights at {host}:{port} cannot be reached: {error}") from error


def broadcast(group: Any, flat: Tensor) -> None:
    """Send ``flat`` from rank 0, or receive into it. Raises RuntimeError if that fails or takes too long."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([flat], options).wait(timedelta(seconds=JOIN_SECONDS + flat.numel() / _RATE))


@dataclass
class WeightSender:
    """The end of a rank of the trainer: answers requests for what it holds and sends it, in threads."""

    held: Callable[[str], MemoryFile | None]
    """Return the weights of a name; None if they are not held any more."""
    device: torch.device
    """With a GPU, weights are sent from it over NCCL to engines that ask for it."""
    port: int = field(init=False)
    _groups: dict[str, Any] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.port = int(self._store.port)
        self._thread = threading.Thread(target=self._run, name="weight-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more requests."""
        self._stopped.set()
        self._thread.join(_ANSWER_SECONDS)
        self._groups.clear()
        del self._store  # its port is free then

    def _run(self) -> None:
        number = 1
        while not self._stopped.wait(_POLL_SECONDS):
            while self._store.check([f"request/{number}"]):
                request = self._store.get(f"request/{number}")
                self._store.delete_key(f"request/{number}")
                # Serve each in a thread of its own: an engine that dies in its group holds up no other.
                threading.Thread(
                    target=self._serve, args=(number, request), name=f"weights-{number}", daemon=True
                ).start()
                number += 1

    def _serve(self, number: int, request: bytes) -> None:
        """Answer one request, then join its group if it is new, and send."""
        try:
            asked = json.loads(request)
            name, wanted, backend = str(asked["group"]), str(asked["name"]), asked["backend"]
        except (ValueError, KeyError, TypeError):
            return
        weights = self.held(wanted)
        if weights is None:
            self._answer(number, error="it is not held any more")
        elif not _GROUP.fullmatch(name) or backend not in ("gloo", "nccl"):
            self._answer(number, error="the group or its backend is malformed")
        else:
            # Take it out while it is used: after a failure it must not be used again.
            group = self._groups.pop(name, None)
            buckets = [
                [[item.name, str(item.dtype).removeprefix("torch."), list(item.shape)] for item in bucket]
                for bucket in weights.buckets(BUCKET_BYTES)
            ]
            # Answer before joining: the engine joins when it has read this, and joining waits for it.
            self._answer(number, is_new=group is None, buckets=buckets)
            try:
                if group is None:
                    group = join_group(connect("localhost", self.port), name, 0, backend)
                self._send(group, weights, backend)
            except (RuntimeError, PublishError) as error:
                logger.warning("an engine did not receive the weights: %s", first_line(error))
            else:
                self._groups[name] = group
                for oldest in list(self._groups)[:-_MOST_GROUPS]:
                    self._groups.pop(oldest, None)

    def _send(self, group: Any, weights: MemoryFile, backend: GroupBackend) -> None:
        for bucket in weights.buckets(BUCKET_BYTES):
            flat = weights.data[bucket[0].begin : bucket[-1].end]
            broadcast(group, flat.to(self.device) if backend == "nccl" else flat)

    def _answer(self, number: int, **answer: Any) -> None:
        self._store.set(f"answer/{number}", json.dumps(answer))


@dataclass(frozen=True)
class WeightTransfer:
    """What the trainer is about to send, and over which group."""

    group: str
    is_new: bool
    """The engine joins the group before it receives."""
    buckets: Sequence[Sequence[tuple[str, str, list[int]]]]
    """Name, dtype and shape of the tensors of each bucket."""


class WeightRequests:
    """The end of ``agentrl serve``: asks one rank of a trainer for weights on behalf of one engine."""

    def __init__(self, host: str, port: int, backend: GroupBackend) -> None:
        self.address = (host, port)
        self.backend = backend
        self._store = connect(host, port)
        self.group = uuid4().hex

    def ask(self, name: str) -> WeightTransfer:
        """Ask for the weights ``name``; the trainer then waits in the group. Raises PublishError."""
        try:
            number = self._store.add("requests", 1)
            asked = {"group": self.group, "name": name, "backend": self.backend}
            self._store.set(f"request/{number}", json.dumps(asked))
            answer: Mapping[str, Any] = json.loads(self._store.get(f"answer/{number}"))
            self._store.delete_key(f"answer/{number}")
        except (RuntimeError, ValueError) as error:
            raise PublishError(
                f"the trainer at {self.address[0]}:{self.address[1]} does not answer: {error}"
            ) from error
        if "error" in answer:
            raise PublishError(f"the trainer does not send the weights {name}: {answer['error']}")
        return WeightTransfer(self.group, answer["is_new"], answer["buckets"])


_HELD = 2
"""An engine may still be loading the version before the newest one."""


@dataclass
class LiveHolder:
    """Holds one rank's shares of the newest versions. The memory is free when the process ends."""

    kind: LiveKind
    device: torch.device
    """Of training: with a GPU, ``distributed`` sends over NCCL to engines that have one."""
    _held: dict[str, tuple[int, MemoryFile]] = field(default_factory=dict)
    _sender: WeightSender | None = None

    def __post_init__(self) -> None:
        process = identify(os.getpid())
        if process is None:
            raise ConfigError(
                f"--weight_sync {self.kind} needs /proc, by which engines find the trainer",
                hint="use --weight_sync disk",
            )
        self._process = process
        if self.kind == "distributed":
            self._sender = WeightSender(self._weights, self.device)

    def hold(self, tensors: Mapping[str, Tensor]) -> LiveShare | None:
        """Hold ``tensors``, by their names in files, and forget the version before the last one.

        Returns None for a rank without a share.
        """
        if not tensors:
            return None
        name = uuid4().hex
        descriptor = write_memory_file(name, tensors)
        file = f"/proc/{self._process.pid}/fd/{descriptor}"
        self._held[name] = (descriptor, open_memory_file(file, name))
        for oldest in list(self._held)[:-_HELD]:
            os.close(self._held.pop(oldest)[0])
        port = None if self._sender is None else self._sender.port
        return LiveShare(
            name=name, host=socket.getfqdn(), process=self._process,
            file=None if self._sender else file, port=port,
        )  # fmt: skip

    def join(self, shares: Sequence[LiveShare | None]) -> LiveWeights:
        """Return the version whose shares the ranks hold."""
        held = tuple(share for share in shares if share is not None)
        return LiveWeights(kind=self.kind, shares=held, nccl=self.device.type == "cuda")

    def close(self) -> None:
        """Forget all versions."""
        if self._sender is not None:
            self._sender.close()
        for descriptor, _ in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _weights(self, name: str) -> MemoryFile | None:
        held = self._held.get(name)
        return held and held[1]
