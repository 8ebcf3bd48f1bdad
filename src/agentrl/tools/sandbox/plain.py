"""Run the program with limits alone, where the kernel allows no namespaces: it sees the host's files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any, Final

from agentrl.tools.sandbox.namespaces import extract, guarded, save
from agentrl.tools.sandbox.program import Job, Streams, become, write_main

_FIRST_USER: Final = 2_000_000_000
_NOBODY: Final = 65534
_KILL_SECONDS: Final = 5.0


class PlainRun:
    """The program as a child of this process, which adopts the processes that it leaves behind."""

    def __init__(self, job: Job, streams: Streams) -> None:
        self._job = job
        self._directory = os.path.join(job.directory, "work")
        user = _unused_user() if os.geteuid() == 0 else None
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        before = os.path.join(job.directory, "files.tar")
        if job.command and os.path.exists(before):
            extract(os.open(before, os.O_RDONLY), self._directory)
        if user is not None:
            os.chmod(job.directory, 0o711)  # the program may pass, and change nothing: archives lie here
            _give(self._directory, user)
        write_main(job, self._directory, user)
        self._status, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            guarded(write, lambda: become(job, self._directory, streams, user))
        os.close(write)
        self._descriptor = os.pidfd_open(self.pid)

    @property
    def waits_on(self) -> int:
        """Return the descriptor that becomes readable at the end."""
        return self._descriptor

    def over_files(self) -> bool:
        """Return whether the directory has too many files, or too large ones."""
        count = size = 0
        for folder, folders, files in os.walk(self._directory):
            for name in (*folders, *files):
                count += 1
                with contextlib.suppress(OSError):
                    size += os.lstat(os.path.join(folder, name)).st_blocks * 512
        limits = self._job.limits
        return count > int(limits["files"]) or size > int(limits["disk_mb"]) << 20

    def end(self, *, keep_files: bool) -> dict[str, Any]:
        """Kill the program and all that it started; return its exit code."""
        status: int | None = None
        deadline = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < deadline:
            for pid in descendants(os.getpid()):
                if pid != os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            try:
                pid, code = os.waitpid(-1, 0)
            except ChildProcessError:
                break
            if pid == self.pid:
                status = os.waitstatus_to_exitcode(code)
        report = os.read(self._status, 65536)
        if report:
            return {"error": str(json.loads(report)["error"])}
        kept = not self._job.command or (keep_files and self._save())
        return {"status": -int(signal.SIGKILL) if status is None else status, "kept": kept}

    def _save(self) -> bool:
        after = os.path.join(self._job.directory, "files.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        kept = save(os.open(after, flags, 0o600), self._directory, self._job)
        shutil.rmtree(self._directory, ignore_errors=True)
        return kept


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all that descend from it."""
    yield pid
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                for child in children.read().split():
                    yield from descendants(int(child))


def _unused_user() -> int:
    """Return a user id that owns nothing and runs nothing else, if this container has one."""
    user = _FIRST_USER + os.getpid()
    with open("/proc/self/uid_map") as mapped:
        ranges = [(int(line.split()[0]), int(line.split()[2])) for line in mapped]
    return user if any(first <= user < first + count for first, count in ranges) else _NOBODY


def _give(directory: str, user: int) -> None:
    """Make ``user`` the owner of the directory and of what an earlier program left in it."""
    os.chown(directory, user, user)
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            os.lchown(os.path.join(folder, name), user, user)
