"""The archives of finished runs: each imports, is shown, and stands on the page of results."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from dashboard_client import opened
from db_command import agentrl_db
from docs_pages import DOCS, ROOT

from agentrl.config.schema import RunConfig
from agentrl.store.client import open_existing

RESULTS = ROOT / "assets" / "results"
ARCHIVES = sorted(path.parent for path in RESULTS.glob("*/manifest.json"))
LARGEST, LARGEST_OF_ALL = 1_500_000, 6_000_000
"""Bytes of an archive, and of all."""


@pytest.mark.integration
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda archive: archive.name)
async def test_an_archive_imports_and_its_curve_and_evaluations_are_shown(
    archive: Path, run_config: RunConfig, drop_later: Callable[[str], object]
) -> None:
    assert await agentrl_db(run_config, "import", str(archive)) == 0
    async with await open_existing(run_config) as store:
        evaluations = [item for item in await store.evaluations.all() if item.results is not None]
    first, *_, last = sorted(evaluations, key=lambda item: item.step or 0)
    assert first.results is not None
    assert last.results is not None
    assert first.results["total"]["score"]["value"] < last.results["total"]["score"]["value"]
    run = f"/runs/{run_config.run_name}"
    async with opened(run_config) as (_, pages):
        for page in ("", "/steps", "/trajectories", "/rewards", "/compare"):
            assert (await pages.get(run + page)).status_code == 200, page
        curve = list(csv.DictReader(io.StringIO((await pages.get(f"{run}/curves.csv")).text)))
    assert [int(row["step"]) for row in curve] == list(range(1, len(curve) + 1))
    assert len(curve) >= 5
    drop_later(run_config.run_name)


def test_archives_are_small_and_stand_on_the_page() -> None:
    sizes = {path.name: sum(file.stat().st_size for file in path.iterdir()) for path in ARCHIVES}
    assert {name: size for name, size in sizes.items() if size > LARGEST} == {}
    assert sum(sizes.values()) < LARGEST_OF_ALL
    named = re.findall(r"agentrl db import assets/results/(\S+)", (DOCS / "results.md").read_text("utf-8"))
    assert set(named) == set(sizes)
