"""One picture of a run: every screen says the same is wrong, and steps are read once."""

from __future__ import annotations

import asyncio
import html
import json
from pathlib import Path
from typing import Any

import pytest
import small_run as run
from dashboard_client import opened

from agentrl.cli import main as cli
from agentrl.config.schema import RunConfig
from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.screens.snapshot import SnapshotReader, findings, state
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


async def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert await asyncio.to_thread(cli.main, [*words, "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


async def test_the_terminal_json_and_the_browser_say_the_same(
    store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run.build(store, tmp_path / "weights")
    await store.database["TrainStep"].update_one({"_id": run.STEP}, {"$set": {"metrics.kl_k3": 0.7}})
    snapshot = await SnapshotReader(store).read()
    found = findings(snapshot)
    assert [item.severity for item in found] == ["bad", "bad", "warn"]
    assert "no inference engine is alive" in found[0].what
    where = ("--run_name", store.run_name, "--db_connection_string", str(run_config.db_connection_string))
    expected = [{"severity": item.severity, "what": item.what, "hint": item.hint} for item in found]
    for words in (("status",), ("audit", "run")):
        value = await _json(capsys, *words, *where)
        assert (value["findings"], value["state"]) == (expected, state(snapshot)[0])
    assert await asyncio.to_thread(cli.main, ["status", *where]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    async with opened(run_config) as (_, client):
        page = html.unescape((await client.get(f"/runs/{store.run_name}")).text)
    for item in found:
        for shown in (screen, page):
            assert item.what in shown
            assert f"→ {item.hint}" in shown


async def test_a_heartbeat_is_old_after_five_intervals_of_the_run(store: Store) -> None:
    engine = InferenceService(id="e", url="http://e", engine="local", model="m", host="h", pid=1)
    await store.services.register(engine)
    await store.services.beat("e", status=ServiceStatus.READY, policy_version=1, running_requests=0)
    await store.settings.join("serve", {"heartbeat_seconds": 0.01}, given=["heartbeat_seconds"], packages={})
    await asyncio.sleep(0.1)
    snapshot = await SnapshotReader(store).read()
    assert [snapshot.is_alive(item) for item in snapshot.engines] == [False]
    snapshot = await SnapshotReader(store).read(60.0)
    assert [snapshot.is_alive(item) for item in snapshot.engines] == [True]


async def test_only_new_steps_are_read_until_a_step_is_undone(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.build(store, tmp_path / "weights")
    reader, read = SnapshotReader(store), []
    steps = reader._views.steps

    async def counting(**query: Any) -> Any:
        read.append(found := await steps(**query))
        return found

    monkeypatch.setattr(reader._views, "steps", counting)
    assert [row.id for row in await reader.steps()] == [run.STEP]
    first = await store.database["TrainStep"].find_one({"_id": run.STEP})
    assert first is not None
    for number in (2, 3):
        await store.database["TrainStep"].insert_one({**first, "_id": f"1/{number}", "step": number})
        await asyncio.sleep(0.6)
        assert len(await reader.steps()) == number
        assert len(read[-1]) == 2
    await store.database["TrainStep"].update_one({"_id": "1/3"}, {"$set": {"status": "reverted"}})
    await asyncio.sleep(0.6)
    assert [row.id for row in await reader.steps()] == [run.STEP, "1/2"]
