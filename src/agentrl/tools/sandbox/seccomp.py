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

from agentrl.tools.sandbox.linux import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, prctl

_NUMBERS: Final[dict[str, tuple[int, dict[str, int]]]] = {
    "x86_64": (
        0xC000003E,
        {
            "add_key": 248, "bpf": 321, "clone": 56, "clone3": 435, "fsopen": 430, "init_module": 175,
            "finit_module": 313, "io_uring_setup": 425, "kexec_load": 246, "keyctl": 250, "kill": 62,
            "memfd_create": 319, "memfd_secret": 447, "mount": 165, "msgget": 68, "move_mount": 429,
            "open_by_handle_at": 304, "open_tree": 428, "perf_event_open": 298, "pidfd_getfd": 438,
            "pidfd_open": 434, "pidfd_send_signal": 424, "pivot_root": 155, "prlimit64": 302,
            "process_vm_readv": 310, "process_vm_writev": 311, "ptrace": 101, "quotactl": 179,
            "request_key": 249, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "semget": 64,
            "setns": 308, "shmget": 29, "socket": 41, "swapon": 167, "tgkill": 234, "tkill": 200,
            "umount2": 166, "unshare": 272, "userfaultfd": 323,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "add_key": 217, "bpf": 280, "clone": 220, "clone3": 435, "fsopen": 430, "init_module": 105,
            "finit_module": 273, "io_uring_setup": 425, "kexec_load": 104, "keyctl": 219, "kill": 129,
            "memfd_create": 279, "memfd_secret": 447, "mount": 40, "msgget": 186, "move_mount": 429,
            "open_by_handle_at": 265, "open_tree": 428, "perf_event_open": 241, "pidfd_getfd": 438,
            "pidfd_open": 434, "pidfd_send_signal": 424, "pivot_root": 41, "prlimit64": 261,
            "process_vm_readv": 270, "process_vm_writev": 271, "ptrace": 117, "quotactl": 60,
            "request_key": 218, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "semget": 190,
            "setns": 268, "shmget": 194, "socket": 198, "swapon": 224, "tgkill": 131, "tkill": 130,
            "umount2": 39, "unshare": 97, "userfaultfd": 282,
        },
    ),
}  # fmt: skip

_DENIED: Final = (
    "add_key", "bpf", "finit_module", "fsopen", "init_module", "io_uring_setup", "kexec_load", "keyctl",
    "memfd_create", "memfd_secret", "mount", "move_mount", "msgget", "open_by_handle_at", "open_tree",
    "perf_event_open", "pidfd_getfd", "pivot_root", "process_vm_readv", "process_vm_writev", "ptrace",
    "quotactl", "request_key", "semget", "setns", "shmget", "swapon", "umount2", "unshare",
    "userfaultfd",
)  # fmt: skip

_SIGNALS: Final = ("kill", "tkill", "pidfd_open", "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
"""Denied where no process namespace hides the other processes of the user."""

_CLONE_NAMESPACES: Final = 0x7E020000
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
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
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(program), zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def filter_code(machine: str, *, namespaces: bool, own_pid: int) -> bytes:
    """Return the filter's instructions. Raises OSError for a machine without known numbers."""
    if machine not in _NUMBERS:
        raise OSError(f"no system-call numbers of {machine}")
    architecture, numbers = _NUMBERS[machine]
    denied = _return(errno.EPERM)
    code = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_JUMP_EQUAL, architecture, yes=1),
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
        families = [_step(_JUMP_EQUAL, family, yes=left) for family, left in _families()]
        code += _when(
            numbers["socket"],
            [_argument(0), *families, _return(errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW)],
        )
    else:
        code += _when(numbers["socket"], [denied])
        for name in ("tgkill", "prlimit64"):
            code += _when(numbers[name], _only_itself(own_pid))
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _families() -> list[tuple[int, int]]:
    """Return each allowed family of sockets, and how many steps lie between it and the end."""
    allowed = (_AF_UNIX, _AF_INET, _AF_INET6)
    return [(family, len(allowed) - place) for place, family in enumerate(allowed)]


def _only_itself(own_pid: int) -> list[bytes]:
    allow = _step(_RETURN, _ALLOW)
    return [
        _argument(0),
        _step(_JUMP_EQUAL, 0, yes=2),
        _step(_JUMP_EQUAL, own_pid, yes=1),
        _return(errno.EPERM),
        allow,
    ]


def _when(number: int, then: list[bytes]) -> list[bytes]:
    """Return ``then``, taken if the loaded number is ``number``; ``then`` ends in a return."""
    return [_step(_JUMP_EQUAL, number, no=len(then)), *then]


def _argument(place: int) -> bytes:
    """Load the low half of an argument."""
    return _step(_LOAD, _ARGUMENT_AT + 8 * place)


def _return(error: int) -> bytes:
    return _step(_RETURN, 0x00050000 | error)


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
