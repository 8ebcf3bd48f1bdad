"""Check the limits of this user and machine: open files, processes, memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from agentrl.cli.doctor.check import Check

_GIB = 2**30
_OPEN_FILES_FAIL, _OPEN_FILES_WARN = 1024, 8192
_PROCESSES_WARN = 1024
_MEMORY_FAIL, _MEMORY_WARN = 2 * _GIB, 8 * _GIB
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def limit_checks() -> Iterator[Check]:
    """Yield the checks of the limits."""
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    yield check_memory(available_memory())


def check_open_files(soft: int, hard: int) -> Check:
    """Check how many files a process may open: samplers have many connections, mongod many files."""
    name = "open files"
    if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES_WARN:
        return Check(name, "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    raised = hard == resource.RLIM_INFINITY or hard >= _OPEN_FILES_WARN
    hint = "ulimit -n 65536" if raised else "let an administrator raise the hard limit in limits.conf"
    return Check(name, "fail" if soft < _OPEN_FILES_FAIL else "warn", f"{soft:,} (hard limit {hard:,})", hint)


def check_processes(soft: int) -> Check:
    """Check how many processes this user may start: sandboxes and tool servers are processes."""
    name = "processes"
    if soft == resource.RLIM_INFINITY or soft >= _PROCESSES_WARN:
        return Check(name, "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    return Check(name, "warn", f"{soft:,}", f"ulimit -u {8 * _PROCESSES_WARN}")


def check_memory(available: int) -> Check:
    """Check the available memory, in bytes."""
    name, found = "memory", f"{available / _GIB:.1f} GiB available"
    if available >= _MEMORY_WARN:
        return Check(name, "ok", found)
    hint = "end other programs, or choose a smaller model; the quickstart needs 16 GiB in all"
    return Check(name, "fail" if available < _MEMORY_FAIL else "warn", found, hint)


def available_memory() -> int:
    """Return the bytes that this process may still use, within the limit of its container."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = _CGROUP_LIMIT.read_text().strip(), int(_CGROUP_USED.read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))
