"""What pages and terminals show of a run and its child."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from child_run import forked_small_run
from rich.console import Console
from small_run import STEP, TRAINED
from test_run_pages import opened, page

from agentrl.config.schema import RunConfig
from agentrl.screens.run_screens import render_run_list, render_run_status
from agentrl.screens.snapshot import SnapshotReader
from agentrl.store.client import Store
from agentrl.store.run_list import Runs

pytestmark = pytest.mark.integration


async def test_screens_show_the_family(store: Store, run_config: RunConfig, tmp_path: Path) -> None:
    """Each run names the others, and what the parent holds is shown by the parent's pages."""
    async with forked_small_run(store, tmp_path) as (child, _), opened(run_config) as (_, client):
        name, fork = child.run_name, "fork at step 1"
        runs = await Runs(store.connection).all(10.0)
        assert f"{store.run_name}, {fork}" in shown(render_run_list("host", runs))
        for run, other in ((child, store.run_name), (store, name)):
            await run.database["TrainStep"].update_one({"_id": STEP}, {"$set": {"metrics.reward": 0.5}})
            status = shown(render_run_status(await SnapshotReader(run).read()))
            assert f"{other}, {fork}" in status
            overview = await page(client, f"/runs/{run.run_name}")
            assert f'<a href="/runs/{other}">{other}, {fork}</a>' in overview
            assert f"/compare?run={run.run_name}&amp;run={other}" in overview
        assert 'data-chart="reward"' in await page(client, f"/compare?run={name}&run={store.run_name}")
        for path in ("steps/1", f"trajectories/{TRAINED}/1/1"):
            answer = await client.get(f"/runs/{name}/{path}")
            assert answer.headers["location"] == f"/runs/{store.run_name}/{path}"


def shown(screen: object) -> str:
    """Return what a terminal of 200 columns shows."""
    text = StringIO()
    Console(file=text, width=200).print(screen)
    return text.getvalue()
