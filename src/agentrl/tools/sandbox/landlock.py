"""Restrict a process to some folders by Landlock (Linux 5.13 or later), without namespaces and privileges.

A restricted process cannot trace or read the memory of processes outside of its restriction either.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable
from typing import Final

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

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


def version() -> int:
    """Return the version of Landlock in this kernel; 0 without it."""
    found = _libc.syscall(
        ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_FLAG)
    )
    return max(0, int(found))


def restrict(
    *, readable: Iterable[str], devices: Iterable[str], writable: str, network: bool = False
) -> bool:
    """Restrict this process, for good, to these paths; return False without Landlock. Raises OSError.

    ``network`` allows TCP. Paths that do not exist are ignored. The process must have set
    PR_SET_NO_NEW_PRIVS.
    """
    found = version()
    if found == 0:
        return False
    everything = (1 << _RIGHTS.get(found, 16)) - 1
    ruleset = _Ruleset(
        files=everything,
        network=_NETWORK if found >= 4 and not network else 0,
        scoped=_SCOPE if found >= 6 else 0,
    )
    size = 24 if found >= 6 else 16 if found >= 4 else 8
    rules = _call(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint(0))
    for paths, rights in (
        (readable, _READ),
        (devices, _READ_FILE | _WRITE_FILE),
        ((writable,), everything),
    ):
        for path in paths:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                _allow(rules, path, rights & everything)
    _call(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)
    return True


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = _PathBeneath(allowed=rights, descriptor=descriptor)
        _call(
            _ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint(0)
        )
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result
