"""SIGKILL to gateway, harness, sampler and MongoDB while harnesses run: each trajectory ends once."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.harness_kills import run_harness_kills

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400), pytest.mark.usefixtures("starts_warm")]


async def test_kills_lose_no_trajectory_and_end_each_once(tmp_path: Path) -> None:
    report = await run_harness_kills(tmp_path / "harness", 12.0, tasks=12, seed=3)
    table = "\n".join(report.lines())
    assert report.violations == [], table
    assert report.scored == report.slots == 24
    assert set(report.kills) == {"gateway", "harness", "sampler", "mongod"}, table
