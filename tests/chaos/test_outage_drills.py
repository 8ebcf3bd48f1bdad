"""A short outage of each service under real samplers: no attempt is used, nothing is sampled twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.drills import DRILLS, run_drills

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.usefixtures("starts_warm")]


async def test_outages_use_up_no_attempt_and_resample_nothing(tmp_path: Path) -> None:
    report = await run_drills(tmp_path / "drills", 4.0, tasks=1000)
    table = "\n".join(report.lines())
    assert report.violations == [], table
    assert [drill.name for drill in report.drills] == list(DRILLS)
    assert [(drill.attempts_used, drill.resampled) for drill in report.drills] == [(0, 0)] * 4
    assert report.scored >= 40
