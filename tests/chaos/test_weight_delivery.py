"""Weights over a real S3 server under kills and an outage: every engine ends with the trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.weight_delivery import run_weight_delivery

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400), pytest.mark.usefixtures("starts_warm")]


async def test_engines_that_share_no_path_end_with_the_trainers_weights(tmp_path: Path) -> None:
    report = await run_weight_delivery(tmp_path, 4.0, away=3.0, seed=1)
    table = "\n".join(report.lines())
    assert report.violations == [], table
    assert sum(report.faults.values()) >= 3, table
    assert report.encodings["delta"] > report.encodings["full"], table
