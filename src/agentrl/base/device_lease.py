"""Let an engine and a trainer take turns on one device: a lease by kernel file locks of this machine.

The holder has an exclusive ``flock`` on a file of the device. The trainer, which waits for it, has one on a
second file, ``wanted``, which the engine watches. The kernel drops the locks of a process that is killed, so
the other one goes on at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from agentrl.errors import ConfigError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
MESSAGE_SECONDS = 30.0
"""Interval of the lines that say who holds the device."""
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_libc = ctypes.CDLL(None)


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA or AMD GPU."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def leased_devices(output: str, variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return the devices of this process by the names of their locks.

    These are the GPUs as CUDA_VISIBLE_DEVICES names them, the same way for engine and trainer; runs on one
    GPU exclude each other. On a machine without GPUs it is the CPU's memory, for the run with the folder
    ``output``.
    """
    if not has_gpu():
        return [f"cpu-{hashlib.sha256(str(Path(output).resolve()).encode()).hexdigest()[:16]}"]
    shown = next((variables[name] for name in _VISIBLE if variables.get(name)), "all")
    return sorted(f"gpu-{name.strip()}" for name in shown.split(","))


class DeviceLease:
    """The turn of one process on its devices."""

    def __init__(
        self, devices: Sequence[str], owner: str, *, shared: bool = False, folder: Path | None = None
    ) -> None:
        """Open the locks, in a folder of this user under the system's folder for temporary files.

        ``owner`` says in messages who this is. Holders of a ``shared`` lease exclude the others alone.
        """
        folder = folder or Path(tempfile.gettempdir()) / f"agentrl-devices-{os.getuid()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise ConfigError(
                f"{folder}, the folder of device locks, belongs to another user", hint="set TMPDIR"
            )
        self._owner = owner
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._names = sorted(devices)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.locks = [os.open(folder / f"{name}.lock", flags, 0o600) for name in self._names]
        """File descriptors. A child that inherits them keeps the devices leased until it has ended too."""
        self._wanted = [os.open(folder / f"{name}.wanted", flags, 0o600) for name in self._names]

    async def acquire(self, *, urgent: bool = False) -> None:
        """Wait for the devices. An ``urgent`` lease makes the holder give way, and comes before others."""
        try:
            if urgent:
                for wanted in self._wanted:
                    await self._until(partial(_try_lock, wanted, fcntl.LOCK_EX))
            # In the order of the names, so that two processes never wait for each other.
            for lock, wanted in zip(self.locks, self._wanted, strict=True):
                await self._until(
                    partial(_try_lock, lock, self._kind, unless_wanted=None if urgent else wanted)
                )
        except BaseException:
            self.release()
            raise
        finally:
            # Withdraw the wish, granted or not: the holder's next turn would end at once.
            for wanted in self._wanted if urgent else ():
                fcntl.flock(wanted, fcntl.LOCK_UN)
        holder = json.dumps({"owner": self._owner, "pid": os.getpid()}).encode()
        for lock, wanted in zip(self.locks, self._wanted, strict=True):
            os.ftruncate(lock, 0)
            os.pwrite(lock, holder, 0)
            os.utime(wanted)  # what cleans /tmp deletes files that nobody has changed for days

    async def until_wanted(self) -> None:
        """Return when another process wants one of the devices."""
        while all(map(_is_free, self._wanted)):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    def release(self) -> None:
        """Let another process have the devices."""
        for lock in self.locks:
            fcntl.flock(lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the devices and close the locks."""
        for lock in (*self.locks, *self._wanted):
            os.close(lock)

    async def _until(self, is_done: Callable[[], bool]) -> None:
        """Poll, and log now and then what this waits for."""
        began = time.monotonic()
        remind_at = began + MESSAGE_SECONDS
        while not is_done():
            now = time.monotonic()
            if now >= remind_at:
                remind_at = now + MESSAGE_SECONDS
                logger.info("waiting for %.0f s for the device %s", now - began, self._describe())
            await asyncio.sleep(POLL_SECONDS)

    def _describe(self) -> str:
        names = ", ".join(self._names)
        try:
            holder = json.loads(os.pread(self.locks[0], 4096, 0))
            return f"{names}: {holder['owner']} (process {holder['pid']}) had it last"
        except (ValueError, KeyError):
            return names


def _try_lock(lock: int, kind: int, unless_wanted: int | None = None) -> bool:
    if unless_wanted is not None and not _is_free(unless_wanted):
        return False
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(lock: int) -> bool:
    # Share the look: two that look at once would take each other for a waiting trainer.
    if not _try_lock(lock, fcntl.LOCK_SH):
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


def return_freed_memory() -> None:
    """Give the memory of dropped objects back to the system; glibc keeps freed blocks for itself."""
    gc.collect()
    trim = getattr(_libc, "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
