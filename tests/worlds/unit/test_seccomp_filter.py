"""The filter of system calls, run by an interpreter of its instructions, for both processor architectures."""

from __future__ import annotations

import errno
import struct

import pytest

from agentrl.worlds.sandbox.seccomp import _ARCHITECTURES, filter_code, numbers_of

ALLOW = 0x7FFF0000
DENY = 0x00050000 | errno.EPERM
OWN = 4321


def decide(machine: str, call: str | int, *arguments: int, namespaces: bool, architecture: int = 0) -> int:
    """Return what the filter returns for one system call."""
    numbers = numbers_of(machine)
    number = numbers[call] if isinstance(call, str) else call
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=iIQ6Q", number, architecture or _ARCHITECTURES[machine], 0, *padded)
    code = filter_code(machine, namespaces=namespaces, own_pid=OWN)
    steps = list(struct.iter_unpack("=HBBI", code))
    value = at = 0
    while True:
        kind, yes, no, operand = steps[at]
        at += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif kind == 0x06:
            return int(operand)
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[kind]
            at += yes if holds else no


@pytest.fixture(params=sorted(_ARCHITECTURES))
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize("call", ["ptrace", "mount", "unshare", "bpf", "memfd_create", "keyctl", "msgget"])
def test_what_programs_have_no_use_for_is_denied(machine: str, call: str, namespaces: bool) -> None:
    assert decide(machine, call, namespaces=namespaces) == DENY


@pytest.mark.parametrize("namespaces", [True, False])
def test_ordinary_calls_and_processes_are_allowed(machine: str, namespaces: bool) -> None:
    unknown = 250 if machine == "aarch64" else 1
    assert decide(machine, unknown, namespaces=namespaces) == ALLOW
    assert decide(machine, "clone", 0x01200011, namespaces=namespaces) == ALLOW
    assert decide(machine, "tgkill", OWN, namespaces=namespaces) == ALLOW
    assert decide(machine, "prlimit64", 0, namespaces=namespaces) == ALLOW


@pytest.mark.parametrize("namespaces", [True, False])
def test_no_namespace_is_created_in_any_way(machine: str, namespaces: bool) -> None:
    for flag in (0x10000000, 0x20000000, 0x40000000, 0x00020000):
        assert decide(machine, "clone", flag | 17, namespaces=namespaces) == DENY
    assert decide(machine, "clone3", namespaces=namespaces) == 0x00050000 | errno.ENOSYS


def test_sockets_are_of_the_own_network_namespace_or_none(machine: str) -> None:
    unsupported = 0x00050000 | errno.EAFNOSUPPORT
    for family in range(50):
        expected = ALLOW if family in (1, 2, 10) else unsupported
        assert decide(machine, "socket", family, namespaces=True) == expected
        assert decide(machine, "socket", family, namespaces=False) == DENY


def test_signals_leave_the_program_only_where_a_namespace_hides_the_others(machine: str) -> None:
    for call in ("kill", "tkill", "pidfd_open", "pidfd_send_signal"):
        assert decide(machine, call, 1, namespaces=True) == ALLOW
        assert decide(machine, call, 1, namespaces=False) == DENY
    assert decide(machine, "tgkill", 1, namespaces=False) == DENY
    assert decide(machine, "prlimit64", 1, namespaces=False) == DENY


def test_locks_and_watches_are_refused_where_the_host_has_the_same_ones(machine: str) -> None:
    for call, error in (("flock", errno.ENOLCK), ("inotify_init1", errno.EMFILE)):
        assert decide(machine, call, namespaces=True) == ALLOW
        assert decide(machine, call, namespaces=False) == 0x00050000 | error


def test_calls_of_another_architecture_are_denied(machine: str) -> None:
    assert decide(machine, 1, namespaces=True, architecture=0x40000003) == DENY
    assert decide(machine, 0x40000001, namespaces=True) == DENY


def test_a_machine_without_known_numbers_is_refused() -> None:
    with pytest.raises(OSError, match="riscv64"):
        filter_code("riscv64", namespaces=True, own_pid=1)
