"""Deny system calls that a program in the sandbox has no use for: a classic BPF filter for seccomp(2).

The filter closes what limits and namespaces leave open: sockets of kinds that no network namespace holds
(vsock), files in memory that no limit counts, new user namespaces, tracing, and kernel interfaces with a
history of holes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final

from agentrl.worlds.sandbox.linux import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, prctl

_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_DENIED: Final = {
    "add_key": (248, 217), "bpf": (321, 280), "finit_module": (313, 273), "fsopen": (430, 430),
    "init_module": (175, 105), "io_uring_setup": (425, 425), "kexec_load": (246, 104), "keyctl": (250, 219),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "mount": (165, 40), "move_mount": (429, 429),
    "msgget": (68, 186), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "pivot_root": (155, 41),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117),
    "quotactl": (179, 60), "request_key": (249, 218), "semget": (64, 190), "setns": (308, 268),
    "shmget": (29, 194), "swapon": (167, 224), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282),
}  # fmt: skip
"""System calls that are always denied, with their numbers on each architecture."""
_SIGNALS: Final = {
    "kill": (62, 129), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130),
}  # fmt: skip
"""Denied where no process namespace hides the other processes of the user."""
_SHARED: Final = {"flock": (73, 32), "fanotify_init": (300, 262), "inotify_init1": (294, 26)}
"""Without namespaces they would lock the host's files, or use up resources that it counts by user."""
_AT_LIMIT: Final = {"flock": errno.ENOLCK, "fanotify_init": errno.EMFILE, "inotify_init1": errno.EMFILE}
_CHECKED: Final = {
    "clone": (56, 220), "clone3": (435, 435), "prlimit64": (302, 261), "socket": (41, 198),
    "tgkill": (234, 131),
}  # fmt: skip
"""Allowed or denied by their arguments."""
_CLONE_NAMESPACES: Final = 0x7E020000
_FAMILIES: Final = (1, 2, 10)
"""Of sockets that are allowed: AF_UNIX, AF_INET, AF_INET6."""
_INOTIFY_INIT: Final = 253
"""An older call of x86_64."""
_X32: Final = 0x40000000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW: Final = 0x7FFF0000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(*, namespaces: bool) -> None:
    """Filter this process's system calls, for good. Raises OSError, also on an unknown architecture.

    Without ``namespaces`` there is no socket at all, and signals reach this process alone.
    """
    code = filter_code(os.uname().machine, namespaces=namespaces, own_pid=os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program))


def filter_code(machine: str, *, namespaces: bool, own_pid: int) -> bytes:
    """Return the filter's instructions. Raises OSError for a machine without known numbers."""
    numbers = numbers_of(machine)
    denied = _return(errno.EPERM)
    code = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_JUMP_EQUAL, _ARCHITECTURES[machine], yes=1),
        denied,
        _step(_LOAD, _NUMBER_AT),
        _step(_JUMP_AT_LEAST, _X32, no=1),
        denied,
        *_when(numbers["clone3"], [_return(errno.ENOSYS)]),  # its flags cannot be read; libc then uses clone
        *_when(
            numbers["clone"],
            [_argument(0), _step(_JUMP_ANY_BIT, _CLONE_NAMESPACES, no=1), denied, _step(_RETURN, _ALLOW)],
        ),
    ]
    for name in (*_DENIED, *(() if namespaces else _SIGNALS)):
        code += _when(numbers[name], [denied])
    if namespaces:
        families = [
            _step(_JUMP_EQUAL, family, yes=len(_FAMILIES) - index) for index, family in enumerate(_FAMILIES)
        ]
        code += _when(
            numbers["socket"],
            [_argument(0), *families, _return(errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW)],
        )
    else:
        for name in _SHARED:
            code += _when(numbers[name], [_return(_AT_LIMIT[name])])
        if machine == "x86_64":
            code += _when(_INOTIFY_INIT, [_return(errno.EMFILE)])
        code += _when(numbers["socket"], [denied])
        only_itself = [
            _argument(0), _step(_JUMP_EQUAL, 0, yes=2), _step(_JUMP_EQUAL, own_pid, yes=1), denied,
            _step(_RETURN, _ALLOW),
        ]  # fmt: skip
        for name in ("tgkill", "prlimit64"):
            code += _when(numbers[name], only_itself)
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def numbers_of(machine: str) -> dict[str, int]:
    """Return the numbers of the system calls that the filter names. Raises OSError for an unknown machine."""
    if machine not in _ARCHITECTURES:
        raise OSError(f"no system-call numbers of {machine}")
    column = list(_ARCHITECTURES).index(machine)
    return {name: both[column] for name, both in {**_DENIED, **_SIGNALS, **_CHECKED, **_SHARED}.items()}


def _when(number: int, then: list[bytes]) -> list[bytes]:
    """Return ``then``, taken if the loaded number is ``number``; ``then`` ends in a return."""
    return [_step(_JUMP_EQUAL, number, no=len(then)), *then]


def _argument(index: int) -> bytes:
    """Load the low half of an argument."""
    return _step(_LOAD, _ARGUMENT_AT + 8 * index)


def _return(error: int) -> bytes:
    return _step(_RETURN, 0x00050000 | error)


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
