"""A run is tagged, renamed and deleted in the browser, by a form of the dashboard alone."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import small_run as run
from dashboard_client import OWN, opened

from agentrl.config.schema import RunConfig
from agentrl.lab.manage_runs import RunAdmin
from agentrl.store.client import Store, open_existing, run_exists

pytestmark = pytest.mark.integration


@pytest.fixture
async def client(run_config: RunConfig) -> AsyncIterator[httpx2.AsyncClient]:
    async with opened(run_config) as (_, client):
        yield client


async def _token(client: httpx2.AsyncClient, page: str) -> str:
    answer = await client.get(page)
    found = re.search(r'name="csrf" value="(\w+)"', answer.text)
    assert answer.status_code == 200
    return found[1]


async def test_tags_and_note_are_those_of_the_form(
    client: httpx2.AsyncClient, store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    await run.build(store, tmp_path / "weights", unfinished=False)
    page = f"/runs/{run_config.run_name}/manage"
    form = {"csrf": await _token(client, page), "action": "describe", "tags": "a, b", "note": "<b>first"}
    assert (await client.post(page, data=form)).status_code == 403
    assert (await client.post(page, data={**form, "csrf": "0" * 64}, headers=OWN)).status_code == 403
    assert (await RunAdmin(store.connection).remarks()).tags == ()
    answer = await client.post(page, data=form, headers=OWN)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run_config.run_name}")
    await client.post(page, data={**form, "tags": "b c"}, headers=OWN)
    remarks = await RunAdmin(store.connection).remarks()
    assert (remarks.tags, remarks.note) == (("b", "c"), "<b>first")
    assert "&lt;b&gt;first" in (await client.get(page)).text
    for bad in ({"tags": "<"}, {"note": "x" * 501}, {"action": "drop"}):
        assert (await client.post(page, data={**form, **bad}, headers=OWN)).status_code == 400


async def test_a_live_run_is_neither_renamed_nor_deleted(
    client: httpx2.AsyncClient,
    store: Store,
    run_config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await run.build(store, tmp_path / "output" / run_config.run_name / "weights")
    monkeypatch.chdir(tmp_path)
    name, page = run_config.run_name, f"/runs/{run_config.run_name}/manage"
    assert "The run is live" in (await client.get(page)).text
    form = {"csrf": await _token(client, page)}
    for action in ({"action": "rename", "new_name": f"{name}_2"}, {"action": "delete", "name": name}):
        answer = await client.post(page, data={**form, **action}, headers=OWN)
        assert answer.status_code == 409
        assert "is live" in answer.text
    assert await run_exists(run_config)


async def test_a_sampler_is_drained(
    client: httpx2.AsyncClient, store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    await run.build(store, tmp_path / "weights", unfinished=False)
    await store.samplers.beat("node1-<7>", host="node1", pid=7, is_draining=False)
    page = f"/runs/{run_config.run_name}/manage"
    form = {"csrf": await _token(client, page), "action": "drain", "sampler": "node1-<7>"}
    assert "node1-&lt;7&gt;" in (await client.get(page)).text
    assert (await client.post(page, data=form)).status_code == 403
    assert (await client.post(page, data={**form, "csrf": "0" * 64}, headers=OWN)).status_code == 403
    assert await store.samplers.beat("node1-<7>", host="node1", pid=7, is_draining=False) is None
    answer = await client.post(page, data=form, headers=OWN)
    assert (answer.status_code, answer.headers["location"]) == (303, page)
    (sampler,) = await store.samplers.all()
    assert sampler.state == "asked to drain"
    assert str(sampler.process.asked_by).endswith("by the dashboard")
    text = (await client.get(page)).text
    assert "asked to drain" in text
    assert ">Drain</button>" not in text
    assert "1 asked to drain" in (await client.get(f"/runs/{run_config.run_name}")).text
    gone = await client.post(page, data={**form, "sampler": "other"}, headers=OWN)
    assert (gone.status_code, "no sampler" in gone.text) == (409, True)


async def test_an_ended_run_is_renamed_and_then_deleted(
    client: httpx2.AsyncClient,
    store: Store,
    run_config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drop_later: Callable[[str], object],
) -> None:
    weights = tmp_path / "output" / run_config.run_name / "weights"
    await run.build(store, weights, unfinished=False)
    monkeypatch.chdir(tmp_path)
    old, new = run_config.run_name, f"{run_config.run_name}_2"
    drop_later(new)
    page = f"/runs/{old}/manage"
    form = {"csrf": await _token(client, page)}
    answer = await client.post(page, data={**form, "action": "rename", "new_name": "a b"}, headers=OWN)
    assert answer.status_code == 400
    answer = await client.post(page, data={**form, "action": "rename", "new_name": new}, headers=OWN)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{new}")
    assert (await client.get(f"/runs/{old}")).status_code == 404
    page = f"/runs/{new}/manage"
    async with await open_existing(replace(run_config, run_name=new)) as renamed:
        assert await renamed.tasks.get(run.TRAINED) is not None
    form = {"csrf": await _token(client, page), "action": "delete", "folder": "1"}
    assert (await client.post(page, data={**form, "name": old}, headers=OWN)).status_code == 400
    answer = await client.post(page, data={**form, "name": new}, headers=OWN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert not await run_exists(replace(run_config, run_name=new))
    assert not (tmp_path / "output" / new).exists()
    assert new not in (await client.get("/")).text
