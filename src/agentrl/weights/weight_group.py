"""Send the weights of a version to engines over process groups of two: the trainer, rank 0, and one engine.

The trainer runs a ``TCPStore``. ``agentrl serve`` finds its address in the version's document, asks there for
a version, and lets its engine join the group and receive. A group of its own for each engine lets an engine
die or join at any time. It is kept between versions, and made again after a failure.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from agentrl.errors import PublishError, first_line
from agentrl.weights.memory_file import MemoryFile

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
            group = self._groups.pop(name, None)
            buckets = [
                [[item.name, str(item.dtype).removeprefix("torch."), list(item.shape)] for item in bucket]
                for bucket in weights.buckets(BUCKET_BYTES)
            ]
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
class Transfer:
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

    def ask(self, name: str) -> Transfer:
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
        return Transfer(self.group, answer["is_new"], answer["buckets"])
