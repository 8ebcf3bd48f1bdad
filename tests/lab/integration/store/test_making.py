"""One process at a time makes a run of a database, and none drops what another has finished."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from agentrl.base.processes import ProcessIdentity, identify
from agentrl.documents.document import now, plain
from agentrl.documents.run import SCHEMA, Maker
from agentrl.errors import LeaseLostError, StoreError
from agentrl.lab.manage_runs import RunAdmin
from agentrl.lab.transfer import Making, make_run
from agentrl.store.client import Store
from agentrl.store.mechanics.connection import Connection

pytestmark = pytest.mark.integration
NAME = "making_child"
RUN = {"version": 1}


@pytest.fixture
async def empty(store: Store) -> Connection:
    await store.connection.client.drop_database(NAME)
    return store.connection.beside(NAME)


async def mark(empty: Connection, process: ProcessIdentity | None, seconds: float) -> None:
    """Leave what a call of another process leaves."""
    expires = now() + timedelta(seconds=seconds)
    maker = Maker(id="other", host="elsewhere", process=process, lease_expires_at=expires)
    fields = {"version": 1, "importing": True, "maker": plain(maker)}
    await empty.collection("Run").insert_one({"_id": SCHEMA, **fields})
    await empty.collection("Task").insert_one({"_id": "half"})


async def test_a_second_call_is_refused_while_the_first_lives(empty: Connection) -> None:
    async with make_run(empty) as making:
        await empty.collection("Task").insert_one({"_id": "a"})
        with pytest.raises(
            StoreError, match=f"another process makes run 'making_child': process {os.getpid()}"
        ):
            async with make_run(empty):
                pytest.fail("two processes make one run")
        await making.finish(RUN)
    with pytest.raises(StoreError, match="is not empty: it holds Task"):
        async with make_run(empty):
            pytest.fail("a run is overwritten")
    assert await empty.collection("Run").find_one({}) == {"_id": SCHEMA, **RUN}
    await empty.client.drop_database(NAME)


async def test_what_nobody_makes_a_run_of_any_more_can_be_deleted(empty: Connection) -> None:
    """Its archive, or its parent's checkpoint, may be gone; a process that lives is not disturbed."""
    admin = RunAdmin(empty)
    assert not await admin.is_unfinished()
    await mark(empty, identify(os.getpid()), 60.0)
    assert await admin.is_unfinished()
    with pytest.raises(StoreError, match="another process makes run 'making_child'"):
        await admin.delete_unfinished()
    await empty.collection("Run").update_one({"_id": SCHEMA}, {"$unset": {"maker": ""}})
    await admin.delete_unfinished()
    assert NAME not in await empty.client.list_database_names()
    await empty.collection("Run").insert_one({"_id": SCHEMA, "importing": True, "renaming": ["a", NAME]})
    assert not await admin.is_unfinished()
    await empty.client.drop_database(NAME)


@pytest.mark.parametrize("ending", [RuntimeError, KeyboardInterrupt])
async def test_what_a_call_leaves_is_begun_anew(empty: Connection, ending: type[BaseException]) -> None:
    async def fail() -> None:
        async with make_run(empty):
            await empty.collection("Task").insert_one({"_id": "half"})
            raise ending

    with pytest.raises(ending):
        await fail()
    async with make_run(empty) as making:
        assert await empty.database.list_collection_names() == ["Run"]
        await making.finish(RUN)
    await empty.client.drop_database(NAME)


@pytest.mark.parametrize(
    ("lives_here", "seconds", "is_taken"),
    [(False, 60.0, False), (False, -1.0, True), (True, -1.0, False)],
    ids=["another machine", "another machine, expired", "stopped on this one"],
)
async def test_who_may_be_alive_keeps_the_database(
    empty: Connection, lives_here: bool, seconds: float, is_taken: bool
) -> None:
    there = ProcessIdentity(boot_id="b", pid_namespace="p", pid=1, started=1)
    await mark(empty, identify(os.getpid()) if lives_here else there, seconds)
    if is_taken:
        async with make_run(empty):
            assert await empty.database.list_collection_names() == ["Run"]
    else:
        with pytest.raises(StoreError, match="on elsewhere"):
            async with make_run(empty):
                pytest.fail("its data are dropped under it")
    await empty.client.drop_database(NAME)


async def test_one_that_stood_still_too_long_touches_nothing(empty: Connection) -> None:
    async with make_run(empty) as making:
        await making.finish(RUN)
    slow = Making(empty, "other")
    for late in (slow.renew(), slow.finish({"version": 2})):
        with pytest.raises(LeaseLostError, match="stood still"):
            await late
    assert not await slow.drop()
    assert await empty.collection("Run").find_one({}) == {"_id": SCHEMA, **RUN}
    await empty.client.drop_database(NAME)
