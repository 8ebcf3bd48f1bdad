"""SIGKILL to samplers and MongoDB while trajectories run in containers: each ends once, nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from rootfs_here import rootfs_problem

from chaos.container_kills import run_container_kills

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.skipif(rootfs_problem() is not None, reason=f"no containers: {rootfs_problem()}"),
]


async def test_kills_lose_no_trajectory_and_leave_no_container(tmp_path: Path) -> None:
    report = await run_container_kills(tmp_path / "containers", 5.0, seed=3)
    table = "\n".join(report.lines())
    assert report.violations == [], table
    assert report.scored == report.slots == 16
    assert report.kills["sampler"] >= 1, table
