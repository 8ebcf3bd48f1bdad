"""The processes of a run under fire: started, signalled, and started again when they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.processes import signal_session, start_child, stop_child, tail

logger = logging.getLogger(__name__)

TESTS = Path(__file__).resolve().parents[1]

_POLL_SECONDS = 0.2
_RESTART_SECONDS = 2.0
_GONE_SECONDS = 20.0
_STOPPED = (0, -signal.SIGTERM)
"""Exit codes of a process that was told to stop; the second, of one that had only begun to start."""
_REFUSED = 1
"""Exit code of a process whose write was refused."""


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that ended although nobody killed it."""

    actor: str
    code: int
    last_lines: str


@dataclass
class Actor:
    """One process of the run, and its present incarnation. A fault holds ``busy`` while it lasts."""

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    exits: list[Exit] = field(default_factory=list)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def role(self) -> str:
        """``sampler``, ``engine`` or ``trainer``."""
        return self.name.partition("-")[0]

    @property
    def pid(self) -> int | None:
        """The living process's id."""
        process = self.process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended by itself with an error."""
        return self.process is not None and self.process.poll() not in (None, 0)

    def start(self) -> None:
        """Start it. Call from the main thread: the process ends with the thread that started it."""
        self.process = start_child(self.command, log=self.log, env=self.env)

    async def kill(self) -> bool:
        """SIGKILL to the process itself; what it started must notice. False where it had ended already."""
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            self.process = process
            return False
        process.kill()
        await asyncio.to_thread(process.wait, _GONE_SECONDS)
        return True

    def freeze(self) -> bool:
        """SIGSTOP; False where it does not run."""
        return self._signal(signal.SIGSTOP)

    def set_aside(self) -> subprocess.Popen[bytes] | None:
        """SIGSTOP, and leave the name to the next process; None where it does not run."""
        frozen = self.process if self.freeze() else None
        if frozen is not None:
            self.process = None
        return frozen

    async def end_superseded(self, frozen: subprocess.Popen[bytes], seconds: float) -> None:
        """SIGCONT a process that was set aside; it must end with an error within ``seconds``.

        With 0 seconds it is killed: no other has taken its place.
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
            shown = "it went on" if code is None else tail(self.log)
            self.exits.append(Exit(f"superseded {self.name}", frozen.returncode, shown))

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    async def stop(self, seconds: float) -> int | None:
        """SIGTERM, and SIGKILL after ``seconds``; the exit code, None where it did not run."""
        process, self.process = self.process, None
        if process is None:
            return None
        code = await asyncio.to_thread(stop_child, process, seconds)
        if code not in _STOPPED:
            self.exits.append(Exit(self.name, code, tail(self.log)))
        return code

    def note_exit(self) -> bool:
        """Whether it has ended by itself; if so it is written down, and there is no process any more."""
        process = self.process
        if process is None or process.poll() is None:
            return False
        self.exits.append(Exit(self.name, process.returncode, tail(self.log)))
        logger.warning("%s ended by itself with exit code %d", self.name, process.returncode)
        self.process = None
        return True

    def _signal(self, number: int) -> bool:
        if self.process is None or self.process.poll() is not None:
            return False
        signal_session(self.process, number)
        return True


async def watch(actors: Sequence[Actor]) -> None:
    """Until cancelled: note whoever ends by itself, and start it again as an operator would."""
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        for actor in actors:
            if not actor.busy.locked() and actor.note_exit():
                async with actor.busy:
                    await asyncio.sleep(_RESTART_SECONDS)
                    actor.start()


def environment() -> dict[str, str]:
    """Environment of an actor: it finds this package, has one thread, and uses no network."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
