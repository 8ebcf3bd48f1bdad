"""A database that goes away: a real mongod, stopped and killed under samplers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from memory_folder import memory_folder
from test_sampling import ADD, Setting, quick, task, until
from tiny_policy import write_tiny_policy

from agentrl.config.schema import RunConfig
from agentrl.documents.status import RecordStatus, SlotStatus
from agentrl.errors import DATABASE
from agentrl.local.mongod import EmbeddedMongo
from agentrl.store import claims
from agentrl.store.client import Store, open_store
from agentrl.store.mechanics.retry import retry_outages

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]
__all__ = ["quick"]

SAMPLER_CLAIMS = 16


@pytest.fixture
def mongo(tmp_path: Path) -> Iterator[EmbeddedMongo]:
    """A server of this test's own, which it may stop."""
    with memory_folder(tmp_path) as folder:
        mongo = EmbeddedMongo(folder / "mongo")
        mongo.up()
        yield mongo
        signal_mongod(mongo, signal.SIGCONT)
        mongo.down()


@pytest.fixture
async def own_store(mongo: EmbeddedMongo, tmp_path: Path) -> AsyncIterator[Store]:
    run = RunConfig(
        run_name=f"outage_{uuid.uuid4().hex[:8]}",
        db_connection_string=mongo.status().uri,
        db_timeout_seconds=1.0,
        log_dir=str(tmp_path / "logs"),
    )
    async with await open_store(run) as opened:
        yield opened


def signal_mongod(mongo: EmbeddedMongo, number: int) -> None:
    pid = mongo.status().pid
    if pid is not None:
        os.kill(pid, number)


def start_sampler(store: Store, mongo: EmbeddedMongo, folder: Path, *flags: str) -> subprocess.Popen[str]:
    """A sampler process whose trajectories wait for an engine that never comes."""
    model = write_tiny_policy(folder / "model")
    command = [
        sys.executable, "-m", "agentrl", "sample", "--run_name", store.run_name,
        "--db_connection_string", mongo.status().uri, "--model_name_or_path", str(model),
        "--log_dir", str(folder / "logs"), "--db_timeout_seconds", "1",
        "--max_concurrent_samples_per_process", str(SAMPLER_CLAIMS), *flags,
    ]  # fmt: skip
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


async def are_claimed(store: Store) -> bool:
    """A few are: without an engine the sampler soon claims no more."""
    return await store.database["Record"].count_documents({"status": RecordStatus.RUNNING.value}) > 0


async def output_of(process: subprocess.Popen[str], seconds: float) -> str:
    """Its output; the process must end by itself within ``seconds``."""
    try:
        output, _ = await asyncio.to_thread(process.communicate, timeout=seconds)
    finally:
        if process.poll() is None:
            process.kill()
    return output


async def test_a_sampler_gives_up_after_db_wait_seconds(
    own_store: Store, mongo: EmbeddedMongo, tmp_path: Path
) -> None:
    await own_store.tasks.load([task("a", slots=SAMPLER_CLAIMS)])
    process = start_sampler(own_store, mongo, tmp_path, "--db_wait_seconds", "2", "--lease_seconds", "3")
    await until(lambda: are_claimed(own_store), 60)
    signal_mongod(mongo, signal.SIGKILL)
    output = await output_of(process, 60)
    assert process.returncode == 1
    assert "did not answer" in output
    assert "--db_wait_seconds" in output
    assert output.count("the database is unavailable") == 1


async def test_a_stopped_sampler_ends_although_the_database_hangs(
    own_store: Store, mongo: EmbeddedMongo, tmp_path: Path
) -> None:
    await own_store.tasks.load([task("a", slots=SAMPLER_CLAIMS)])
    process = start_sampler(own_store, mongo, tmp_path)
    await until(lambda: are_claimed(own_store), 60)
    signal_mongod(mongo, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    output = await output_of(process, 60)
    assert process.returncode == 0
    assert "leases" in output


async def test_a_stopped_sampler_hands_all_claims_back_together(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.tasks.load([task("a", slots=SAMPLER_CLAIMS)])
    claims = [
        await store.claims.claim(split="train", owner="o", lease_seconds=60) for _ in range(SAMPLER_CLAIMS)
    ]
    held = [claim for claim in claims if claim is not None]
    await store.records.create(held[0])
    await store.attempts.release(held[1])
    transactions = 0
    transaction = store.connection.transaction

    async def counted(callback):  # type: ignore[no-untyped-def]
        nonlocal transactions
        transactions += 1
        return await transaction(callback)

    monkeypatch.setattr(store.connection, "transaction", counted)
    assert await store.attempts.release_all(held) == [held[1]]
    assert transactions == 1
    found = await store.tasks.get("train/0/a")
    assert found is not None
    assert {(slot.status, slot.released) for slot in found.slots} == {(SlotStatus.OPEN, 1)}
    records = await store.records.by_task("train/0/a")
    assert [record.status for record in records] == [RecordStatus.RELEASED] * SAMPLER_CLAIMS


async def test_an_outage_within_db_wait_seconds_loses_nothing(
    own_store: Store, mongo: EmbeddedMongo, caplog: pytest.LogCaptureFixture
) -> None:
    await own_store.tasks.load([task("a", slots=4)])
    loop = asyncio.get_running_loop()
    outages = iter([True])

    def say(prompt: str) -> str:
        if next(outages, False):
            signal_mongod(mongo, signal.SIGSTOP)
            loop.call_later(2.5, signal_mongod, mongo, signal.SIGCONT)
        return "<answer>3</answer>" if "tool\n3" in prompt else ADD

    setting = Setting(own_store, say)
    setting.sampler._config = replace(setting.sampler._config, idle_exit_seconds=None)
    with retry_outages(60), caplog.at_level(logging.WARNING):
        await setting.run()
    records = await own_store.records.by_task("train/0/a")
    sampled = [record for record in records if record.status is not RecordStatus.RELEASED]
    assert [record.score for record in sampled] == [1.0] * 4
    assert sum(record.status is RecordStatus.RELEASED for record in records) <= 1  # the claim in flight
    assert caplog.text.count("the database is unavailable") == 1
    assert "the database is back" in caplog.text
    *again, outage = await own_store.outages.past(5)
    assert {(item.dependency, item.held) for item in [*again, outage]} == {("the database", 0)}
    assert outage.ended_at is not None
    assert outage.ended_at > outage.began_at  # `again`: calls on connections that it left broken, 0 ms long
    assert "did not answer" in outage.why


async def test_a_claim_whose_answer_was_lost_is_released_and_uses_up_no_attempt(
    store: Store,
) -> None:
    await store.tasks.load([task("a", slots=2)])
    setting = Setting(store, "<answer>3</answer>", claims={"lease_seconds": 3.0})
    owner = setting.sampler._config.owner
    lost = await store.claims.claim(split="train", owner=owner, lease_seconds=3.0)
    assert lost is not None
    store.connection.outage.call_failed("the answer was lost", 1.0)
    store.connection.outage.call_succeeded()
    await setting.run()
    records = await store.records.by_task("train/0/a")
    assert [(record.traj_id, record.attempt, record.status) for record in records] == [
        (0, 1, RecordStatus.ABANDONED), (1, 1, RecordStatus.ABANDONED),
    ]  # fmt: skip
    assert [(each.attempt, each.ended) for each in records[0].owners] == [(1, "released"), (2, None)]
    found = await store.tasks.get("train/0/a")
    assert found is not None
    assert [slot.released for slot in found.slots] == [1, 0]


async def test_a_sampler_that_starts_after_an_outage_leaves_leases_that_nobody_could_renew(
    own_store: Store, mongo: EmbeddedMongo
) -> None:
    await own_store.tasks.load([task("a", slots=2)])
    held = await own_store.claims.claim(split="train", owner="old", lease_seconds=1.0)
    assert held is not None
    await own_store.records.create(held)
    signal_mongod(mongo, signal.SIGKILL)
    await expired_long_ago(1.0)
    await asyncio.to_thread(mongo.up)
    run = RunConfig(run_name=own_store.run_name, db_connection_string=mongo.status().uri)
    async with await open_store(run) as late:
        assert await late.expired_leases.reap("train", grace_seconds=600.0) == 0
        other = await late.claims.claim(split="train", owner="new", lease_seconds=600.0)
        assert other is not None
        assert other.traj_id != held.traj_id
        assert await late.claims.claim(split="train", owner="new", lease_seconds=600.0) is None
        with retry_outages(60):
            assert await own_store.claims.heartbeat([held], 600.0) == []
        found = await late.tasks.get("train/0/a")
        assert found is not None
        assert {slot.owner for slot in found.slots} == {"old", "new"}
        await late.claims.heartbeat([other], 0.05)
        await expired_long_ago(0.05)
        assert await late.expired_leases.reap("train", grace_seconds=600.0) == 1
        await late.outages.add_past(
            "o/1", dependency=str(DATABASE), by="o", why="it hung", ago=0.0, seconds=60.0
        )
        await own_store.claims.heartbeat([held], -1.0)
        assert await late.expired_leases.reap("train", grace_seconds=600.0) == 0
        assert await late.expired_leases.reap("train") == 1


async def test_a_sampler_that_has_just_started_takes_nothing_over(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "RENEWAL_SECONDS", 600.0)
    await store.tasks.load([task("a", slots=1)])
    held = await store.claims.claim(split="train", owner="old", lease_seconds=-1.0)
    assert held is not None
    assert await store.expired_leases.reap("train", grace_seconds=600.0) == 0
    assert await store.claims.claim(split="train", owner="new", lease_seconds=600.0) is None


async def expired_long_ago(lease_seconds: float) -> None:
    """Wait until a lease of so long has been expired for more than a second, the resolution of a start."""
    over = time.monotonic() + lease_seconds + 1.5
    while time.monotonic() < over:  # noqa: ASYNC110  nothing announces the time
        await asyncio.sleep(0.05)
