"""The processes of a chaos run: start them, send them signals, and restart them when they have ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.base.processes import ChildProcess, signal_session, stop_child, tail, thread_limits

logger = logging.getLogger(__name__)

TESTS = Path(__file__).resolve().parents[1]

_POLL_SECONDS = 0.2
_RESTART_SECONDS = 2.0
_GONE_SECONDS = 20.0
_STOPPED = (0, -signal.SIGTERM)
"""Exit codes of a stopped process; the second is that of a process that was still starting."""
_REFUSED = 1
"""Exit code of a process whose write the store refused."""


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that ended although no fault killed it."""

    actor: str
    code: int
    last_lines: str


@dataclass
class Actor(ChildProcess):
    """One process of the run, which writes to a log file. A fault holds ``busy`` while it lasts."""

    exits: list[Exit] = field(default_factory=list)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def role(self) -> str:
        """The role of the process: ``sampler``, ``engine`` or ``trainer``."""
        return self.name.partition("-")[0]

    @property
    def has_failed(self) -> bool:
        """Return whether the process has ended with an error."""
        return self.process is not None and self.process.poll() not in (None, 0)

    async def kill(self) -> bool:
        """Send SIGKILL to the process alone, not to its children; return False if it had already ended."""
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            self.process = process
            return False
        process.kill()
        await asyncio.to_thread(process.wait, _GONE_SECONDS)
        return True

    def freeze(self) -> bool:
        """Send SIGSTOP; return False if the process does not run."""
        return self.signal(signal.SIGSTOP)

    def set_aside(self) -> subprocess.Popen[bytes] | None:
        """Send SIGSTOP and return the process, so that another can be started; None if it does not run."""
        frozen = self.process if self.freeze() else None
        if frozen is not None:
            self.process = None
        return frozen

    async def end_superseded(self, frozen: subprocess.Popen[bytes], seconds: float) -> None:
        """Resume a process that was set aside; record it unless it ends with an error within ``seconds``.

        With 0 seconds kill it instead: no other process has replaced it.
        """
        if seconds:
            signal_session(frozen, signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(frozen.wait, seconds)
        code = frozen.poll()
        if code is None:
            signal_session(frozen, signal.SIGKILL)
            await asyncio.to_thread(frozen.wait, _GONE_SECONDS)
        if seconds and code != _REFUSED:
            shown = "it continued" if code is None else self._last_lines()
            self.exits.append(Exit(f"superseded {self.name}", frozen.returncode, shown))

    def thaw(self) -> None:
        """Send SIGCONT."""
        self.signal(signal.SIGCONT)

    async def stop(self, seconds: float) -> int | None:
        """Send SIGTERM, and SIGKILL after ``seconds``; return the exit code, None if it did not run."""
        process, self.process = self.process, None
        if process is None:
            return None
        code = await asyncio.to_thread(stop_child, process, seconds)
        if code not in _STOPPED:
            self._record_exit(code)
        return code

    def note_exit(self) -> bool:
        """Return whether the process has ended by itself; if so, record the exit and forget the process."""
        process = self.process
        if process is None or process.poll() is None:
            return False
        self._record_exit(process.returncode)
        logger.warning("%s ended by itself with exit code %d", self.name, process.returncode)
        self.process = None
        return True

    def _record_exit(self, code: int) -> None:
        self.exits.append(Exit(self.name, code, self._last_lines()))

    def _last_lines(self) -> str:
        return "" if self.log is None else tail(self.log)


async def watch(actors: Sequence[Actor]) -> None:
    """Record each actor that ends by itself and restart it after two seconds, until cancelled."""
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        for actor in actors:
            if not actor.busy.locked() and actor.note_exit():
                async with actor.busy:
                    await asyncio.sleep(_RESTART_SECONDS)
                    actor.start()


def environment() -> dict[str, str]:
    """Return the environment of an actor: this package on its path, one thread, no network."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **thread_limits(),
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
