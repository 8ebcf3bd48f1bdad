"""Errors of the driver, retries during an outage, turns, and writes that are coalesced."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConfigurationError,
    NetworkTimeout,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WriteConcernError,
    WriteError,
)

from agentrl.base.registry import Registry
from agentrl.config.schema import RunConfig
from agentrl.errors import StoreError, StoreUnavailableError
from agentrl.store import client
from agentrl.store.client import open_store
from agentrl.store.mechanics import retry as retry_module
from agentrl.store.mechanics.connection import (
    Connection,
    LocalServer,
    Repository,
    Turns,
    WriteCoalescer,
    context_with_turn,
    database_call,
)
from agentrl.store.mechanics.retry import OutageLog, log_store_errors, retry_outages, store_error


class Flaky(Repository):
    """A call that raises each of ``errors`` once and then succeeds."""

    def __init__(self, connection: Connection, *errors: PyMongoError) -> None:
        super().__init__(connection)
        self.errors = list(errors)
        self.calls = 0

    @database_call
    async def read(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


@pytest.fixture
async def flaky(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Flaky]]:
    monkeypatch.setattr(retry_module, "_FIRST_DELAY", 0.001)
    connection = Connection("mongodb://127.0.0.1:1/", "run", 0.2)
    yield lambda *errors: Flaky(connection, *errors)
    await connection.close()


async def test_a_member_that_has_just_started_is_unavailable(flaky: Callable[..., Flaky]) -> None:
    unready = ConfigurationError("Sessions are not supported by this MongoDB deployment")
    with pytest.raises(StoreUnavailableError):
        await flaky(unready).read()


async def test_messages_name_the_host_and_never_the_password() -> None:
    connection = Connection("mongodb://user:hunter2@127.0.0.1:1/?authSource=admin", "run", 0.2)
    timeout = connection.error("claiming", ServerSelectionTimeoutError("no server"))
    refused = connection.error("claiming", OperationFailure("auth failed", 18, {"errmsg": "auth failed"}))
    await connection.close()
    assert "127.0.0.1:1 did not answer within 0.2 s" in timeout.message
    assert "refused the user" in refused.message
    assert "hunter2" not in str(timeout) + str(refused)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"db_connection_string": "mongodb://127.0.0.1:1/", "db_timeout_seconds": 0.3},
         r"127\.0\.0\.1:1 did not answer"),
        ({"db_connection_string": "postgres://x"}, "not a MongoDB URI"),
        ({"mongo_dir": "none"}, r"no embedded MongoDB.*\n.*--db_connection_string"),
    ],
    ids=["unreachable", "bad URI", "no server"],
)  # fmt: skip
async def test_a_server_that_is_not_there_is_an_error(
    flags: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=says):
        await open_store(RunConfig(**flags))


@pytest.mark.parametrize(
    "error",
    [
        ServerSelectionTimeoutError("none"),
        AutoReconnect("reset"),
        NetworkTimeout("slow"),
        NotPrimaryError("stepped down"),
        OperationFailure("write conflict", 112, {"errorLabels": ["TransientTransactionError"]}),
        WriteConcernError("exceeded the configured 'transactionLifetimeLimitSeconds'", 290),
    ],
)
async def test_a_call_is_retried_while_the_database_is_unavailable(
    flaky: Callable[..., Flaky], error: PyMongoError, caplog: pytest.LogCaptureFixture
) -> None:
    part = flaky(error, error)
    with caplog.at_level(logging.WARNING), retry_outages(30):
        assert await part.read() == 3
    assert len(caplog.records) == 2
    assert "retrying" in caplog.text


async def test_without_a_retry_policy_the_first_failure_is_raised(flaky: Callable[..., Flaky]) -> None:
    part = flaky(AutoReconnect("reset"))
    with pytest.raises(StoreUnavailableError, match="flaky: read"):
        await part.read()
    assert part.calls == 1


async def test_retries_end_at_the_time_limit(flaky: Callable[..., Flaky]) -> None:
    part = flaky(*[AutoReconnect("reset")] * 1000)
    with pytest.raises(StoreUnavailableError), retry_outages(0.05):
        await part.read()
    assert 1 < part.calls < 1000


async def test_a_refusal_is_not_retried(flaky: Callable[..., Flaky]) -> None:
    part = flaky(OperationFailure("not authorized", 13))
    with pytest.raises(StoreError) as caught, retry_outages(30):
        await part.read()
    assert part.calls == 1
    assert not isinstance(caught.value, StoreUnavailableError)


@pytest.mark.parametrize("seconds", [0, 30])
@pytest.mark.parametrize("reported", [AutoReconnect("cancelled"), None])
async def test_a_cancellation_that_the_driver_swallows_still_counts(
    flaky: Callable[..., Flaky], seconds: float, reported: PyMongoError | None
) -> None:
    part = flaky()
    begun = asyncio.Event()

    @database_call
    async def read(self: Flaky) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if reported is not None:
                raise reported from None

    with retry_outages(seconds):
        reading = asyncio.create_task(read(part))
    await begun.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_what_is_read_and_written_is_the_majoritys() -> None:
    connection = Connection("mongodb://127.0.0.1:1/", "run", 0.2)
    assert connection.client.write_concern.document == {"w": "majority", "j": True}
    assert connection.collection("Task").read_concern.level == "majority"
    await connection.close()


async def test_a_periodic_task_logs_a_refusal_and_raises_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), log_store_errors(logging.getLogger("x"), "not renewed"):
        raise StoreError("the field is unknown")
    assert [record.message for record in caplog.records] == ["not renewed"]
    with pytest.raises(StoreUnavailableError), log_store_errors(logging.getLogger("x"), "not renewed"):
        raise StoreUnavailableError("no answer")
    with caplog.at_level(logging.WARNING), log_store_errors(logging.getLogger("x"), "away", outages=True):
        raise StoreUnavailableError("no answer")
    assert [record.message for record in caplog.records] == ["not renewed", "away"]


class _Server:
    """A fake of a client's ``admin`` database that answers with one version."""

    def __init__(self, version: str) -> None:
        self._version = version

    async def command(self, name: str) -> dict[str, str]:
        hello = {"setName": "rs", "localTime": datetime.now(UTC)}
        return {"version": self._version} if name == "buildInfo" else hello


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("4.4.29", False), ("5.0.31", False), ("6.0.5", True), ("7.0.28", True), ("8.2.1-rc0", True)],
)
async def test_servers_older_than_6_0_are_refused(version: str, accepted: bool) -> None:
    connection = Connection("mongodb://db:1", "run", timeout=1.0)
    await connection.client.close()
    connection.client = cast("Any", SimpleNamespace(admin=_Server(version)))
    says = f"is version {version}, and AgentRL needs 6.0 or newer"
    with nullcontext() if accepted else pytest.raises(StoreError, match=says):
        await connection.check()


@pytest.mark.parametrize(
    "error",
    [
        WriteError("WiredTigerRecordStore::insertRecord 28: No space left on device", 8),
        BulkWriteError({"writeErrors": [{"code": 8, "errmsg": "28: No space left on device"}]}),
        OperationFailure("out of disk space", 14031),
    ],
)
def test_a_full_disk_is_an_outage_that_names_it(error: PyMongoError) -> None:
    found = store_error("images: put", error, "h:1", 5.0)
    assert isinstance(found, StoreUnavailableError)
    assert "the disk of MongoDB at h:1 is full" in found.message


def test_a_call_that_fails_after_the_outage_in_which_it_began_belongs_to_that_outage() -> None:
    log = OutageLog()
    called_at = time.monotonic()
    log.call_failed("gone", 1.0, called_at)
    log.call_succeeded()
    log.call_failed("gone", 1.0, called_at)
    assert log.seconds_since > 0
    log.call_succeeded()
    assert len(log.take_past()) == 1
    log.call_failed("gone again", 1.0, time.monotonic())
    assert log.seconds_since == 0
    log.call_succeeded()
    assert [past.why for past in log.take_past()] == ["gone again"]


async def test_operations_wait_for_their_turn_and_nested_ones_do_not() -> None:
    turns, running, most = Turns(2), 0, 0

    async def nested() -> int:
        return 1

    async def operation() -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        result = await turns.take(nested)
        writer = asyncio.create_task(turns.take(nested), context=context_with_turn())
        result += await writer  # as a coalesced write, for which those with a turn wait
        running -= 1
        return result

    async with asyncio.timeout(5):
        results = await asyncio.gather(*(turns.take(operation) for _ in range(20)))
    assert (results, most) == ([2] * 20, 2)


async def test_what_is_known_of_an_outage_is_named() -> None:
    known = StoreError("the disk of /mongo is full", hint="free some space")
    for explain, says in ((lambda: known, "disk of /mongo is full"), (lambda: None, "MongoDB at db:1")):
        connection = Connection("mongodb://db:1", "run", 1.0, explain)
        found = connection.error("reading", AutoReconnect("gone"))
        assert isinstance(found, StoreUnavailableError)
        assert says in found.message
        await connection.close()


async def test_without_a_uri_the_embedded_server_is_asked_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: Registry[Callable[[str], LocalServer]] = Registry("database server", group="agentrl.no_servers")
    monkeypatch.setattr(client, "DATABASE_SERVERS", servers)
    run = RunConfig(db_connection_string=None, mongo_dir="m")
    with pytest.raises(StoreError, match="has no embedded MongoDB") as refused:
        await open_store(run)
    assert "--db_connection_string" in str(refused.value.hint)
    servers.add(lambda folder: LocalServer(f"mongodb://{folder}:no_port", lambda: None), "embedded")
    with pytest.raises(StoreError, match="is not a MongoDB URI"):
        await open_store(run)


class Writes:
    """Doubles numbers; negative ones are refused, and ``failure`` is what a batch raises."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.batches: list[int] = []
        self.failure = failure
        self.combiner = WriteCoalescer(self.together, self.alone)

    async def together(self, items: Sequence[int]) -> list[int] | None:
        self.batches.append(len(items))
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return None if min(items) < 0 else [2 * item for item in items]

    async def alone(self, item: int) -> int:
        self.batches.append(1)
        await asyncio.sleep(0)
        if item < 0:
            raise StoreError(f"{item} is refused")
        return 2 * item

    async def all(self, *items: int) -> list[int | BaseException]:
        return await asyncio.gather(*map(self.combiner.write, items), return_exceptions=True)


async def test_what_comes_together_is_written_together_in_order() -> None:
    writes = Writes()
    assert await writes.all(*range(100)) == [2 * number for number in range(100)]
    assert writes.batches == [64, 36]
    assert await writes.all(7) == [14]
    assert writes.batches == [64, 36, 1]


async def test_one_that_is_refused_fails_alone() -> None:
    first, refused, last = await Writes().all(1, -2, 3)
    assert (first, last) == (2, 6)
    assert isinstance(refused, StoreError)


async def test_what_the_server_refuses_together_is_written_one_by_one() -> None:
    writes = Writes(OperationFailure("a validator"))
    assert await writes.all(1, 2) == [2, 4]
    assert writes.batches == [2, 1, 1]


async def test_a_lost_server_is_everyones_error() -> None:
    results = await Writes(AutoReconnect("gone")).all(1, 2)
    assert [type(result) for result in results] == [AutoReconnect, AutoReconnect]


async def test_a_cancelled_caller_disturbs_no_other() -> None:
    writes = Writes()
    first, second = (asyncio.ensure_future(writes.combiner.write(number)) for number in (1, 2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 4
    with pytest.raises(asyncio.CancelledError):
        await first
