"""The trainer's lease on a real server: one trainer at a time, and the one before it is fenced."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agentrl.base.processes import ProcessIdentity, identify
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import TrainerEnd
from agentrl.documents.training import TrainStep
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store.client import Store
from agentrl.train.lease import hold_lease

pytestmark = pytest.mark.integration

HOST = socket.gethostname()


def step(attempt: int, number: int) -> TrainStep:
    return TrainStep(id=f"{attempt}/{number}", step=number, policy_version=0, data=(), owner="t")


def version(number: int) -> PolicyVersion:
    return PolicyVersion(id=number, step=number, location="/w", files=(), train_step=None)


async def acquire(
    store: Store, owner: str, process: ProcessIdentity | None = None, lease: float = 60.0
) -> int:
    pid = os.getpid() if process is None else process.pid
    return await store.trainer_lease.acquire(owner, HOST, pid, lease, process)


async def test_a_second_trainer_is_told_who_holds_the_run(store: Store) -> None:
    assert await acquire(store, "first") == 1
    with pytest.raises(StoreError, match=rf"first \(process {os.getpid()} on {HOST}\)"):
        await acquire(store, "second")
    await store.trainer_lease.release(1)
    assert await acquire(store, "second") == 2
    await store.trainer_lease.release(1)
    assert (await store.trainer_lease.read()).owner == "second"


@pytest.fixture(params=["reaped", "zombie"])
def dead(request: pytest.FixtureRequest) -> Iterator[ProcessIdentity]:
    """A process that has ended; as a zombie nobody has asked for its exit code yet."""
    process = subprocess.Popen(["sleep", "60"])
    identity = identify(process.pid)
    assert identity is not None
    process.kill()
    if request.param == "reaped":
        process.wait(30)
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield identity
    process.wait(30)


async def test_a_dead_process_of_this_host_is_replaced_at_once(store: Store, dead: ProcessIdentity) -> None:
    await acquire(store, "dead", dead)
    assert await acquire(store, "new") == 2


async def test_a_later_process_with_the_pid_of_a_dead_one_is_not_taken_for_it(store: Store) -> None:
    here = identify(os.getpid())
    assert here is not None
    await acquire(store, "before", replace(here, started=here.started - 1))
    assert await acquire(store, "new") == 2


@pytest.mark.parametrize("elsewhere", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}])
async def test_a_live_trainer_elsewhere_with_our_host_name_and_pid_is_not_evicted(
    store: Store, elsewhere: dict[str, str]
) -> None:
    async with hold_lease(store, 3.0) as first:
        fields = {f"process.{name}": value for name, value in elsewhere.items()}
        await store.database["TrainerLease"].update_one({"_id": "trainer"}, {"$set": fields})
        with pytest.raises(StoreError, match="this run has a trainer"):
            async with hold_lease(store, 3.0):
                pytest.fail("two trainers hold one run")
        await first.check()


async def test_how_the_last_trainer_ended_is_stored_until_the_next_begins(store: Store) -> None:
    async with hold_lease(store, 60.0) as lease:
        lease.ended = TrainerEnd.FINISHED
    assert (await store.trainer_lease.read()).ended is TrainerEnd.FINISHED
    async with hold_lease(store, 60.0):
        assert (await store.trainer_lease.read()).ended is None
    released = await store.trainer_lease.read()
    assert (released.owner, released.ended) == (None, None)


async def test_a_dead_trainer_elsewhere_is_waited_for_no_longer_than_its_lease(store: Store) -> None:
    assert await store.trainer_lease.acquire("far", "another-host", 1, 1.5) == 1
    async with asyncio.timeout(30), hold_lease(store, 60.0) as lease:
        assert lease.attempt == 2


async def test_a_dead_process_elsewhere_is_replaced_when_its_lease_runs_out(store: Store) -> None:
    assert await store.trainer_lease.acquire("far", "another-host", 1, 60) == 1
    with pytest.raises(StoreError, match="another-host"):
        await acquire(store, "new")
    await store.trainer_lease.renew(1, 0.0)
    assert await acquire(store, "new") == 2
    with pytest.raises(LeaseLostError):
        await store.trainer_lease.renew(1, 60)


async def test_every_write_of_a_replaced_trainer_is_refused(store: Store) -> None:
    first = await acquire(store, "first", lease=0.0)
    await store.steps.plan(step(first, 1), attempt=first)
    await store.steps.commit("1/1", {}, [], attempt=first)
    await store.steps.plan(step(first, 2), attempt=first)
    second = await acquire(store, "second")
    with pytest.raises(LeaseLostError):
        await store.steps.plan(step(first, 3), attempt=first)
    with pytest.raises(LeaseLostError):
        await store.steps.commit("1/2", {}, [], attempt=first)
    with pytest.raises(LeaseLostError):
        await store.steps.revert_after(0, attempt=first)
    policies = store.policy_versions
    for refused in (
        lambda: store.training.quarantine({"task": "t"}, "why", attempt=first),
        lambda: policies.reserve(version(0), attempt=first),
        lambda: policies.publish(version(0), attempt=first),
        lambda: policies.withdraw_after(0, attempt=first),
        lambda: policies.reinstate(version(0), attempt=first),
        lambda: policies.mark_pruned([], attempt=first),
        lambda: store.trainer_lease.discard_checkpoints(first, ["checkpoint-000001"]),
    ):
        with pytest.raises(LeaseLostError):
            await refused()
    assert await policies.all() == []
    assert (await store.trainer_lease.read()).discarded == ()
    assert [item.id for item in await store.steps.find()] == ["1/1"]
    assert await store.steps.revert_after(1, attempt=second) == 1
    await store.steps.plan(step(second, 2), attempt=second)


async def test_a_takeover_and_a_commit_do_not_pass_each_other(store: Store) -> None:
    first = await acquire(store, "first", lease=0.0)
    await store.steps.plan(step(first, 1), attempt=first)
    commit, second = await asyncio.gather(
        store.steps.commit("1/1", {}, [], attempt=first), acquire(store, "second"),
        return_exceptions=True,
    )  # fmt: skip
    assert second == 2
    assert commit is None or isinstance(commit, LeaseLostError)
    assert len(await store.steps.find()) == (commit is None)
