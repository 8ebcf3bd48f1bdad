"""Time on a device: a stopwatch that waits for the work it measures, and the peak of matrix products."""

from __future__ import annotations

import time
from functools import cache

import torch

from agentrl.train.throughput import table_peak

_SIZE = 1024
_TRIES = 5


class Stopwatch:
    """Adds up wall-clock seconds by name. On an accelerator it waits for what was started."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The time since the last lap belongs to ``name``."""
        now = self._now()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that products of ``dtype`` matrices can reach on ``device``.

    What the vendor states for bfloat16 on a known accelerator; else the fastest of a few products of two
    1024 x 1024 matrices, measured once a process with its number of threads.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        stated = table_peak(torch.cuda.get_device_name(device))
        if stated is not None:
            return stated
    left, right = (torch.randn(_SIZE, _SIZE).to(device, dtype) for _ in range(2))
    best = float("inf")
    for _ in range(_TRIES):
        watch = Stopwatch(device)
        torch.mm(left, right)
        watch.lap("product")
        best = min(best, watch.seconds["product"])
    return 2 * _SIZE**3 / best
