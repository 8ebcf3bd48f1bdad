"""Sample the CPU seconds and the memory of the processes that a command has started."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import psutil


class Meter(threading.Thread):
    """Samples CPU seconds and resident memory of the processes that a command has started.

    A server that has left the command's process tree, as mongod does, is found by ``scratch`` in its command.
    """

    def __init__(self, pid: int, scratch: str) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._scratch = scratch
        self._cpu: dict[int, float] = {}
        self.samples: list[tuple[float, float]] = [(time.time(), 0.0)]
        self.peak_gb: dict[str, float] = {}

    def run(self) -> None:
        """Sample until the command has ended."""
        while True:
            try:
                if self._root.status() == psutil.STATUS_ZOMBIE:
                    return
                processes = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            servers = [each for each in psutil.process_iter(["cmdline"]) if self._is_server(each)]
            for process in {*processes, *servers}:
                self._read(process)
            self.samples.append((time.time(), sum(self._cpu.values())))
            time.sleep(0.5)

    def cpu_at(self, when: float) -> float:
        """Return the CPU seconds used until the Unix time ``when``."""
        return max((cpu for at, cpu in self.samples if at <= when), default=0.0)

    def _is_server(self, process: psutil.Process) -> bool:
        words = process.info["cmdline"] or ()
        return _kind(words) == "mongod" and any(self._scratch in word for word in words)

    def _read(self, process: psutil.Process) -> None:
        try:
            with process.oneshot():
                kind = _kind(process.cmdline())
                times = process.cpu_times()
                resident = process.memory_info().rss / 1e9
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return
        self._cpu[process.pid] = times.user + times.system
        self.peak_gb[kind] = max(self.peak_gb.get(kind, 0.0), resident)


def _kind(command: Sequence[str]) -> str:
    words = " ".join(command)
    named = {
        "agentrl.local.engine": "engine", "agentrl train": "trainer", "agentrl sample": "sampler",
        "mongod": "mongod", "time_to_reward_trl": "TRL",
    }  # fmt: skip
    return next((kind for part, kind in named.items() if part in words), "other")
