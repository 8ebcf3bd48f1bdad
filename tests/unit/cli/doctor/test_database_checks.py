"""``agentrl doctor`` on the database server and on the limits of this machine."""

from __future__ import annotations

import resource
from datetime import date
from typing import Any

import pytest

from agentrl.cli.doctor.machine import Check, check_memory, check_open_files, check_processes
from agentrl.cli.doctor.services import server_checks
from agentrl.store.admin.server import ServerInfo

TODAY = date(2026, 11, 22)


def _checks(**changes: Any) -> dict[str, Check]:
    fields: dict[str, Any] = {
        "host": "h:27017", "version": (7, 0, 14), "replica_set": "rs", "members": 3,
        "latency_seconds": 0.001, "clock_offset_seconds": 0.02, "user": "agentrl_auditor@admin",
        "roles": ["agentrl_auditor@admin"], "may_read": True, "may_write": False, "free_bytes": 2**40,
    }  # fmt: skip
    return {check.name: check for check in server_checks(ServerInfo(**(fields | changes)), TODAY)}


def test_a_good_server_passes() -> None:
    checks = _checks()
    assert {check.state for check in checks.values()} == {"ok"}
    assert "replica set rs of 3, supported until 2027-08-31" in checks["database"].found
    assert "enough for audit" in checks["database rights"].found


@pytest.mark.parametrize(
    ("changes", "name", "state", "part"),
    [
        ({"version": (6, 0, 5)}, "database", "warn", "support of 6.0 ended on 2025-07-31"),
        ({"version": (9, 1)}, "database", "warn", "knows 6, 7 and 8"),
        ({"latency_seconds": 0.2}, "database latency", "warn", "200.0 ms"),
        ({"clock_offset_seconds": -3.0}, "clock", "warn", "3.00 s ahead of"),
        ({"clock_offset_seconds": 60.0}, "clock", "warn", "60.00 s behind"),
        ({"user": None}, "database rights", "warn", "no login"),
        ({"may_read": False}, "database rights", "fail", "may not read"),
        ({"free_bytes": 2**28}, "database disk", "fail", "0.2 GiB"),
    ],
)
def test_each_fault_is_named_with_its_fix(changes: dict[str, Any], name: str, state: str, part: str) -> None:
    check = _checks(**changes)[name]
    assert check.state == state
    assert part in check.found
    assert check.hint


@pytest.mark.parametrize(
    ("check", "state"),
    [
        (check_open_files(512, 4096), "fail"),
        (check_open_files(1024, 65536), "warn"),
        (check_open_files(65536, 65536), "ok"),
        (check_open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok"),
        (check_processes(100), "warn"),
        (check_processes(resource.RLIM_INFINITY), "ok"),
        (check_memory(2**30), "fail"),
        (check_memory(4 * 2**30), "warn"),
        (check_memory(32 * 2**30), "ok"),
    ],
)
def test_limits(check: Check, state: str) -> None:
    assert check.state == state
    assert bool(check.hint) is (state != "ok")
