"""Call the Linux functions that Python's standard library lacks: namespaces, mounts, prctl.

Only the standard library is imported here: the launcher is a bare interpreter, started for each program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Collection, Iterable
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_SECCOMP: Final = 22
PR_CAPBSET_DROP: Final = 24
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38

_MOUNT_SETATTR: Final = 442
_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION_3: Final = 0x20080522
_AT_RECURSIVE: Final = 0x8000
_AT_FDCWD: Final = -100
_RDONLY_NOSUID_NODEV: Final = 1 | 2 | 4

_libc = ctypes.CDLL(None, use_errno=True)
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_VERSION_FLAG: Final = 1
_PATH_BENEATH: Final = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_REFER, _TRUNCATE, _IOCTL_DEVICE = (1 << bit for bit in range(13, 16))
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of rights on files, by version; later versions have those of version 5."""

_NETWORK: Final = 3
"""To bind and to connect TCP sockets, from version 4."""
_SCOPE: Final = 3
"""Abstract Unix sockets and signals reach the restricted processes alone, from version 6."""


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def prctl(option: int, *values: int) -> None:
    """Call prctl(2), with zeros for the arguments that are left out. Raises OSError."""
    four = [*values, 0, 0, 0, 0][:4]
    _check(_libc.prctl(option, *map(ctypes.c_ulong, four)), f"prctl {option}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces. Raises OSError."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(descriptor: int) -> None:
    """Move this process into the namespace of a descriptor. Raises OSError."""
    _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(0)), "setns")


def set_hostname(name: str) -> None:
    """Name the machine of this process's namespace. Raises OSError."""
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name.encode()))), "sethostname")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2). Raises OSError."""
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(done, f"mount {kind or 'of ' + source} at {target}")


def bind_read_only(source: str, target: str) -> None:
    """Show ``source`` and all that is mounted below it at ``target``, read-only. Raises OSError."""
    mount(source, target, flags=MS_BIND | MS_REC)
    make_read_only(target, recursive=True)


def make_read_only(target: str, *, recursive: bool) -> None:
    """Make a mount read-only, without devices and set-uid programs (Linux 5.12 or later). Raises OSError."""
    attributes = _MountAttr(attr_set=_RDONLY_NOSUID_NODEV)
    _call(
        f"mount_setattr of {target}",
        _MOUNT_SETATTR,
        ctypes.c_int(_AT_FDCWD),
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )


def pivot_root(new: str, old: str) -> None:
    """Make ``new`` the root, and show the present root at ``old``. Raises OSError."""
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"no system-call numbers of {os.uname().machine}")
    _call("pivot_root", number, new.encode(), old.encode())


def detach(target: str) -> None:
    """Unmount ``target`` and all below it. Raises OSError."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount of {target}")


def keep_capabilities(kept: Collection[int], *, by_programs: Collection[int] = ()) -> None:
    """Give up all capabilities but ``kept``; what this process starts keeps ``by_programs``.

    Raises OSError.
    """
    for capability in range(64):
        try:
            if capability not in by_programs:
                prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # past the last one, or never held
            continue
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    low, high = (sum(1 << one % 32 for one in kept if one // 32 == half) for half in range(2))
    sets = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(sets)), "capset")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _call(what: str, number: int, *arguments: object) -> int:
    """Return the result of a system call for which libc has no function. Raises OSError."""
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    _check(min(result, 0), what)
    return result


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


def landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0 without it."""
    version = _libc.syscall(
        ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_FLAG)
    )
    return max(0, int(version))


def restrict_paths(
    *, readable: Iterable[str], devices: Iterable[str], writable: str, network: bool = False
) -> bool:
    """Restrict this process, for good, to these paths; return False without Landlock. Raises OSError.

    ``network`` allows TCP. Paths that do not exist are ignored. The process must have set
    PR_SET_NO_NEW_PRIVS.
    """
    version = landlock_version()
    if version == 0:
        return False
    everything = (1 << _RIGHTS.get(version, 16)) - 1
    ruleset = _Ruleset(
        files=everything,
        network=_NETWORK if version >= 4 and not network else 0,
        scoped=_SCOPE if version >= 6 else 0,
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _call("landlock", _CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint(0))
    for paths, rights in (
        (readable, _READ),
        (devices, _READ_FILE | _WRITE_FILE),
        ((writable,), everything),
    ):
        for path in paths:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                _allow(rules, path, rights & everything)
    _call("landlock", _RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)
    return True


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = _PathBeneath(allowed=rights, descriptor=descriptor)
        kind = ctypes.c_int(_PATH_BENEATH)
        _call("landlock", _ADD_RULE, ctypes.c_int(rules), kind, ctypes.byref(rule), ctypes.c_uint(0))
    finally:
        os.close(descriptor)
