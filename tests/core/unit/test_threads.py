"""Run functions that block in threads whose waiting is not running, and that no hung one takes away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from agentrl.base.concurrency import Threads, own_code, time_limit
from agentrl.errors import OutageError

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
