"""Runs the processes of a quickstart: starts them, restarts what dies, and stops them in order."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import AgentRLError
from agentrl.processes import signal_session, start_child, stop_child, stop_children, tail

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
POLL_SECONDS = 0.3


@dataclass
class Member:
    """One process of the run; ``process`` is its current incarnation."""

    name: str
    command: Sequence[str]
    log: Path | None
    env: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    restarts: int = field(default=0)

    def start(self) -> None:
        """Start it, or start it again."""
        self.process = start_child(self.command, log=self.log, env=self.env)


class Supervisor:
    """Keeps helpers alive while one main process runs; whatever happens, ``stop`` leaves nothing behind."""

    def __init__(self) -> None:
        self._members: list[Member] = []

    def start(self, member: Member) -> None:
        """Start a helper process; it is restarted when it dies, up to MAX_RESTARTS times."""
        member.start()
        self._members.append(member)

    def run_main(self, main: Member, *, deadline: float) -> int:
        """Run ``main`` to its end and return its exit code.

        At ``deadline`` (monotonic seconds) it gets SIGTERM, which lets it finish its step and save.
        """
        main.start()
        self._members.insert(0, main)
        process = main.process
        assert process is not None
        asked = False
        while process.poll() is None:
            self._revive(main)
            if not asked and time.monotonic() > deadline:
                asked = True
                signal_session(process, signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        return process.returncode

    def stop(self, grace_seconds: float = 60.0) -> None:
        """Stop everything: the main process first, so that it can save, then the rest side by side."""
        members, self._members = self._members, []
        running = [member.process for member in members if member.process is not None]
        if running:
            stop_child(running[0], grace_seconds)
        stop_children(running[1:], grace_seconds=20.0)

    def _revive(self, main: Member) -> None:
        for member in self._members:
            if member is main or member.process is None or member.process.poll() is None:
                continue
            code = member.process.returncode
            if code == 0:
                member.process = None
                continue
            member.restarts += 1
            if member.restarts > MAX_RESTARTS:
                raise AgentRLError(
                    f"{member.name} has ended {member.restarts} times, the last time with exit code {code}",
                    cure=f"read {member.log}; its last lines are:\n{tail(member.log) if member.log else ''}",
                )
            logger.warning("%s ended with exit code %s; starting it again", member.name, code)
            member.start()
