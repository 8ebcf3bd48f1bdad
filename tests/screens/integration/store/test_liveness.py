"""Who is alive, as the trainer's log and ``agentrl audit run`` say it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from agentrl.data import stream as stream_module
from agentrl.data.stream import DataStream, Freshness, StreamSettings
from agentrl.documents.run import Doing, InferenceService
from agentrl.documents.status import ServiceStatus, Work
from agentrl.documents.task import Slot, Task
from agentrl.screens.snapshot import SnapshotReader
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

ENGINE = InferenceService(id="e", url="http://host:1", engine="local", model="/m", host="host", pid=1)


async def described(store: Store, alive_seconds: float = 60.0) -> str:
    return (await store.services.liveness("train", alive_seconds)).describe()


async def add_task(store: Store) -> None:
    await store.tasks.load([
        Task(
            id="train/0/a", task_id="a", split="train", epoch=0, order=0, query="?", scorer="exact",
            slots=(Slot(traj_id=0), Slot(traj_id=1), Slot(traj_id=2)),
        )
    ])  # fmt: skip


async def test_samplers_are_alive_while_they_send_heartbeats_or_hold_claims(store: Store) -> None:
    assert "no sampler has begun a trajectory" in await described(store)
    await add_task(store)
    for owner, lease in (("one", 60), ("one", 60), ("two", 0.01)):
        claim = await store.claims.claim(split="train", owner=owner, lease_seconds=lease)
        assert claim is not None
        await store.records.create(claim)
    await asyncio.sleep(0.05)
    assert "samplers: 1, with 2 claims, 1 holding claims" in await described(store)
    await store.samplers.beat("one", host="node1", pid=7, is_draining=True)
    assert "samplers: 1, with 2 claims, 1 draining" in await described(store)
    liveness = (await SnapshotReader(store).read()).liveness
    assert (liveness.claims, liveness.sampler_states) == ({"one": 2}, {"one": "draining"})
    await store.database["Task"].update_many({}, {"$set": {"slots.$[].lease_expires_at": ENGINE.started_at}})
    assert "samplers: 1, with 0 claims, 1 draining" in await described(store)
    waits = Doing(work=Work.WAITING, what="for a group that it may sample")
    await store.samplers.beat("two", host="node1", pid=8, is_draining=False, doing=waits)
    assert "1 draining, 1 waiting for a group that it may sample" in await described(store)
    for name in ("one", "two"):
        await store.samplers.end(name)
    assert "no sampler is alive, the last trajectory began" in await described(store)


async def test_the_lease_of_a_trainer_says_what_it_does(store: Store) -> None:
    attempt = await store.trainer_lease.acquire("t", "h", 1, 60.0)
    await store.trainer_lease.renew(attempt, 60.0, Doing(work=Work.TRAINING, what="step 7"))
    lease = await store.trainer_lease.read()
    assert lease.doing is not None
    assert lease.doing.shown == "training step 7"
    await store.trainer_lease.release(attempt)
    assert (await store.trainer_lease.read()).doing is None


async def test_engines_are_alive_while_their_hearts_beat(store: Store) -> None:
    assert "no engine has registered" in await described(store)
    await store.services.register(ENGINE)
    assert "engines: 1 starting" in await described(store)
    beat = {"running_requests": 0, "policy_version": 1, "detail": "version 2 refused"}
    await store.services.beat("e", status=ServiceStatus.READY, **beat)  # type: ignore[arg-type]
    assert "engines: 1 ready" in await described(store)
    dead = await described(store, alive_seconds=-1.0)
    assert "no engine is alive: http://host:1 went silent" in dead
    assert "version 2 refused" in dead
    await store.services.stop("e")
    assert "http://host:1 stopped" in await described(store)


async def test_the_trainer_says_who_is_alive_while_it_waits(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it computes a step, the data of the next one are awaited ahead, and nobody waits for them."""
    monkeypatch.setattr(stream_module, "LOG_EVERY_SECONDS", 0.0)
    await add_task(store)
    settings = StreamSettings(
        groups_per_step=6, num_epochs=1, freshness=Freshness(max_staleness=1), wait_seconds=60.0
    )
    stream = DataStream(store, settings)
    logged = asyncio.Event()
    monkeypatch.setattr(stream_module.logger, "filters", [lambda record: logged.set() or True])
    with caplog.at_level(logging.INFO):
        stream.prefetch(1)
        await asyncio.sleep(0.3)
        assert not logged.is_set()
        waiting = asyncio.create_task(stream.take(1))
        await asyncio.wait_for(logged.wait(), 30)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await stream.close()
    assert "waiting for groups: 0 of 6 are ready; no sampler has begun a trajectory" in caplog.text
    assert "no engine has registered" in caplog.text
