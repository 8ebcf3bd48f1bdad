"""Tasks, waits and threads beside other work: errors reach the caller, and a hung call stops no other."""

from __future__ import annotations

import asyncio
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from waiting import cancel

from agentrl.base import concurrency
from agentrl.base.concurrency import (
    Backoff,
    Threads,
    background,
    end_tasks,
    own_code,
    task_group,
    time_limit,
    wait_for_any,
)
from agentrl.errors import AgentRLError, OutageError

_LONG = 60.0


async def fails(error: Exception | None = None, after: float = 0.0) -> None:
    await asyncio.sleep(after)
    raise error or ValueError("job")


async def fails_when_cancelled(error: Exception | None = None) -> None:
    try:
        await asyncio.sleep(_LONG)
    finally:
        raise error or ValueError("end")


async def swallows_cancellations(times: int) -> None:
    for _ in range(times):
        try:
            await asyncio.sleep(_LONG)
        except asyncio.CancelledError:
            continue


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(record.exc_info[1]) for record in caplog.records if record.exc_info]


async def test_jobs_run_during_the_block_and_are_cancelled_at_its_end() -> None:
    seen = []

    async def job() -> None:
        seen.append("begins")
        try:
            await asyncio.sleep(_LONG)
        finally:
            await asyncio.sleep(0)
            seen.append("ended")

    async with background(job(), job()):
        await asyncio.sleep(0)
        assert seen == ["begins", "begins"]
    assert seen == ["begins", "begins", "ended", "ended"]


async def test_a_job_that_has_not_begun_is_cancelled_without_a_warning() -> None:
    async with background(asyncio.sleep(_LONG)):
        pass


async def test_a_job_may_return_early() -> None:
    async with background(asyncio.sleep(0)):
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_failing_job_cancels_the_block_and_raises_its_error() -> None:
    error = ValueError("job")
    with pytest.raises(ValueError, match="job") as raised:
        async with background(asyncio.sleep(_LONG), fails(error)):
            await asyncio.sleep(_LONG)
    assert raised.value is error
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # no cancellation is left over


async def test_the_error_of_a_job_comes_before_what_its_interruption_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ValueError, match="job"):
        async with background(fails()):
            await fails_when_cancelled(KeyError("block"))
    assert logged_errors(caplog) == ["'block'"]


async def test_a_job_that_fails_is_raised_even_if_the_block_suppresses_its_cancellation() -> None:
    with pytest.raises(ValueError, match="job"):
        async with background(fails()):
            await swallows_cancellations(1)


async def test_a_job_that_fails_while_it_is_ended_raises_its_error() -> None:
    with pytest.raises(ValueError, match="end"):
        async with background(fails_when_cancelled()):
            await asyncio.sleep(0)


async def test_the_error_of_the_block_comes_before_a_failure_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(KeyError, match="block"):
        async with background(fails_when_cancelled()):
            await fails(KeyError("block"))
    assert logged_errors(caplog) == ["end"]


async def test_the_cancellation_of_the_caller_passes_through() -> None:
    async def caller() -> None:
        async with background(asyncio.sleep(_LONG)):
            await asyncio.sleep(_LONG)

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    await cancel(task)


async def test_a_cancellation_of_the_caller_comes_before_the_error_of_a_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    interrupted = asyncio.Event()

    async def caller() -> None:
        async with background(fails()):
            try:
                await asyncio.sleep(_LONG)
            finally:
                interrupted.set()
                await asyncio.sleep(_LONG)

    task = asyncio.create_task(caller())
    await interrupted.wait()
    await cancel(task)
    assert logged_errors(caplog) == ["job"]


async def test_a_timeout_around_the_block_stays_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), background(asyncio.sleep(_LONG)):
            await asyncio.sleep(_LONG)


async def test_a_block_inside_the_cleanup_of_a_cancelled_task_raises_the_error_of_its_job() -> None:
    async def caller() -> str:
        try:
            await asyncio.sleep(_LONG)
        except asyncio.CancelledError:
            try:
                async with background(fails()):
                    await asyncio.sleep(_LONG)
            except ValueError as error:
                return str(error)
        return ""

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "job"


async def test_a_task_that_swallows_one_cancellation_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrency, "END_SECONDS", 0.02)
    task = asyncio.create_task(swallows_cancellations(2))
    await asyncio.sleep(0)
    await end_tasks(task)
    assert task.done()


async def test_a_task_that_does_not_end_is_logged_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(concurrency, "END_SECONDS", 0.02)
    monkeypatch.setattr(concurrency, "LAST_SECONDS", 0.02)
    task = asyncio.create_task(swallows_cancellations(3), name="stubborn")
    await asyncio.sleep(0)
    await end_tasks(task)
    assert [record.__dict__["task"] for record in caplog.records] == ["stubborn"]
    task.cancel()
    await asyncio.wait([task])


async def test_a_caller_that_is_cancelled_while_it_ends_tasks_waits_for_their_end() -> None:
    ended = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(_LONG)
        finally:
            await asyncio.sleep(0.05)
            ended.set()

    job = asyncio.create_task(slow())
    await asyncio.sleep(0)
    ending = asyncio.create_task(end_tasks(job))
    await asyncio.sleep(0.01)
    await cancel(ending)
    assert ended.is_set()


async def test_end_tasks_logs_the_errors_that_nobody_has_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "agentrl.base.concurrency")
    seen, unseen = asyncio.create_task(fails()), asyncio.create_task(fails(ValueError("unseen")))
    expected = asyncio.create_task(fails(AgentRLError("no database")))
    in_the_end = asyncio.create_task(fails_when_cancelled())
    await asyncio.wait([seen, unseen, expected])
    assert isinstance(seen.exception(), ValueError)
    await end_tasks(seen, unseen, expected, in_the_end)
    assert logged_errors(caplog) == ["unseen", "end"]
    assert "no database" in caplog.text


async def test_a_task_group_raises_its_first_error_itself() -> None:
    async def two(seconds: float) -> None:
        async with task_group() as group:
            group.create_task(asyncio.sleep(_LONG))
            group.create_task(fails(after=0.01))
            await asyncio.sleep(seconds)

    task = asyncio.current_task()
    assert task is not None
    for seconds in (0.0, _LONG):  # the error comes when the block has ended, or inside it
        with pytest.raises(ValueError, match="job"):
            await two(seconds)
        assert task.cancelling() == 0


async def test_a_cancellation_while_a_task_group_ends_is_not_lost() -> None:
    async def ends_slowly() -> None:
        try:
            await asyncio.sleep(_LONG)
        finally:
            await asyncio.sleep(0.05)

    async def caller() -> None:
        async with task_group() as group:
            group.create_task(fails())
            group.create_task(ends_slowly())

    task = asyncio.create_task(caller())
    await asyncio.sleep(0.02)
    await cancel(task)


async def test_a_task_group_waits_for_tasks_that_its_tasks_start() -> None:
    ended = []

    async def first(group: asyncio.TaskGroup) -> None:
        await asyncio.sleep(0)
        group.create_task(second())

    async def second() -> None:
        await asyncio.sleep(0)
        ended.append("second")

    async with task_group() as group:
        group.create_task(first(group))
    assert ended == ["second"]


async def test_wait_for_any_returns_at_an_event_a_task_and_the_timeout() -> None:
    never, event = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await wait_for_any(never, event, timeout=_LONG)
    assert event.is_set()
    task = asyncio.create_task(asyncio.sleep(0))
    await wait_for_any(never, tasks=[task], timeout=None)
    assert task.done()
    await wait_for_any(never, timeout=0.0)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, [0.5, 1.0, 2.0, 3.0, 3.0]),
        ({"factor": 1.0}, [0.5] * 5),
        ({"attempts": 2}, [2.0, 3.0, 3.0, 3.0, 3.0]),
        ({"attempts": 10_000, "factor": 9.0}, [3.0] * 5),
        ({"attempts": 5, "factor": 1e300}, [3.0] * 5),
    ],
)
def test_a_wait_grows_up_to_its_bound(how: dict[str, Any], expected: list[float]) -> None:
    backoff = Backoff("the server", 0.5, 3.0, **how)
    assert [backoff.next() for _ in range(5)] == expected
    assert backoff.seconds == expected[-1]
    backoff.reset()
    assert backoff.next() == 0.5


@pytest.mark.parametrize(("first", "expected"), [(1.0, math.inf), (0.0, 0.0)])
def test_what_no_float_holds_is_the_longest_wait(first: float, expected: float) -> None:
    assert Backoff("the server", first, math.inf, attempts=2000).next() == expected


def test_jitter_shortens_each_wait_by_a_share_of_its_own() -> None:
    backoff = Backoff("the server", 1.0, 1.0, jitter=0.5)
    waits = [backoff.next() for _ in range(100)]
    assert 0.5 <= min(waits) < 0.6 < 0.9 < max(waits) <= 1.0


LIMIT = 30
"""Seconds after which a test fails instead of hanging."""


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hung functions wait for; they return at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


async def hang(threads: Threads, gate: threading.Event, calls: int) -> None:
    """Give up ``calls`` calls that have begun and go on."""
    begun = threading.Semaphore(0)

    def wait() -> None:
        begun.release()
        gate.wait(LIMIT)

    for _ in range(calls):
        call = asyncio.create_task(threads.run(wait))
        await asyncio.to_thread(begun.acquire)
        call.cancel()
        await asyncio.wait([call])


async def test_waiting_for_a_thread_takes_no_time_of_the_call(gate: threading.Event) -> None:
    threads = Threads("tests", running=2)
    first = [asyncio.create_task(threads.run(gate.wait, LIMIT)) for _ in range(2)]
    running = peak = 0

    async def limited() -> str:
        async with time_limit(0.2):
            return str(await threads.run(lambda: "done"))

    waiting = asyncio.create_task(limited())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.4):
            await asyncio.shield(waiting)
    gate.set()
    assert await waiting == "done"
    await asyncio.gather(*first)
    lock = threading.Lock()

    def count() -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    await asyncio.gather(*(threads.run(count) for _ in range(20)))
    assert peak == 2


async def test_hung_calls_do_not_keep_others_waiting_up_to_a_limit(gate: threading.Event) -> None:
    threads = Threads("tests", running=2, hung=5)
    await hang(threads, gate, 5)
    with pytest.raises(OutageError, match="5 calls of tests go on after their time limit"):
        await threads.run(int)
    gate.set()
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                assert await asyncio.gather(*(threads.run(int) for _ in range(8))) == [0] * 8
                break
            except OutageError:
                await asyncio.sleep(0.01)


async def test_a_call_that_is_given_up_while_it_waits_is_never_begun(gate: threading.Event) -> None:
    threads = Threads("tests", running=1)
    first = asyncio.create_task(threads.run(gate.wait, LIMIT))
    calls: list[int] = []
    waiting = asyncio.create_task(threads.run(calls.append, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    gate.set()
    await first
    await threads.run(calls.append, 2)
    assert calls == [2]


VARIABLE: ContextVar[str] = ContextVar("variable", default="unset")


async def test_a_function_sees_the_context_and_its_exceptions_are_raised() -> None:
    threads = Threads("tests")
    VARIABLE.set("set")
    assert await threads.run(VARIABLE.get) == "set"
    for error in (ValueError("no"), SystemExit(3), KeyboardInterrupt()):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)):
            await threads.run(fail)
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        await threads.run(next, iter(()))


async def test_what_users_code_gives_to_asyncios_executor_leaves_the_executor_free(
    gate: threading.Event,
) -> None:
    threads = Threads("tests", running=2)

    async def name(**_: Any) -> str:
        return str(await asyncio.to_thread(lambda: threading.current_thread().name))

    with threads.asyncios():
        hung = [asyncio.create_task(asyncio.to_thread(gate.wait, LIMIT)) for _ in range(2)]
        await asyncio.sleep(0)
        late = asyncio.create_task(asyncio.to_thread(int))
        with own_code():
            assert (await name()).startswith("asyncio")
    assert (await name()).startswith("asyncio")
    hung[0].cancel()
    assert await asyncio.wait_for(late, LIMIT) == 0, "the place of a call that is given up is free"
    with threads.asyncios():
        assert await name() == "agentrl tests"
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)


def test_a_process_with_a_hung_call_exits() -> None:
    code = """
import asyncio, time
from agentrl.base.concurrency import TOOL_THREADS, GRAPH_THREADS
async def main():
    try:
        await asyncio.wait_for(TOOL_THREADS.run(time.sleep, 600), 0.1)
    except TimeoutError:
        pass
    with GRAPH_THREADS.asyncios():
        try:
            await asyncio.wait_for(asyncio.to_thread(time.sleep, 600), 0.1)
        except TimeoutError:
            print("given up")
asyncio.run(main())
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert (ended.stdout, ended.stderr) == ("given up\n", "")
