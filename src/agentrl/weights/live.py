"""Hold the newest versions of a trainer in memory, for engines that take them without a disk."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

import torch
from torch import Tensor

from agentrl.documents.run import LiveKind, LiveShare, LiveWeights
from agentrl.errors import ConfigError
from agentrl.processes import identify
from agentrl.weights.memory_file import MemoryFile, open_memory_file, write_memory_file
from agentrl.weights.weight_group import WeightSender

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
