"""A manager that is dead from the start, and a judge that refuses everybody, close no slot."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.refusals import run_refusals

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.usefixtures("starts_warm")]


async def test_refusals_close_no_slot_and_use_up_no_attempt(tmp_path: Path) -> None:
    report = await run_refusals(tmp_path / "refusals", 1.0, tasks=24)
    assert report.violations == [], "\n".join(report.lines())
    assert [(item.closed, item.attempts_used) for item in report.refusals] == [(0, 0)] * 5
    assert report.refusals[0].sampled == 0
