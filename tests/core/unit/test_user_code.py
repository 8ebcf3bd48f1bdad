"""Nothing that an extension raises passes the barrier, except the cancellation of the task that called it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import pytest
from waiting import cancel

from agentrl.base.user_code import contain, contain_call, describe
from agentrl.documents.document import sanitize_bson
from agentrl.errors import EngineError, ScorerError, TrajectoryError
from agentrl.observe.logging import MESSAGE_CHARS, failure_text


class UnspeakableError(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        sys.exit("no")


async def exits() -> None:
    sys.exit(3)


async def exits_in_a_task() -> None:
    await asyncio.wait_for(exits(), 5)


async def exits_in_a_group() -> None:
    await asyncio.gather(exits(), asyncio.sleep(0))


async def exits_in_a_thread() -> None:
    await asyncio.to_thread(sys.exit, 3)


async def cancels_its_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def bad() -> None:
        raise error

    return bad


async def recurses() -> None:
    await recurses()


def is_not_async() -> Awaitable[None]:
    return None  # type: ignore[return-value]


BAD = {
    "exits": exits, "exits in a task": exits_in_a_task, "exits in a group": exits_in_a_group,
    "exits in a thread": exits_in_a_thread, "interrupts": raising(KeyboardInterrupt()),
    "cancels itself": raising(asyncio.CancelledError()), "cancels its task": cancels_its_task,
    "closes": raising(GeneratorExit()), "ends": raising(StopAsyncIteration()),
    "cannot be shown": raising(UnspeakableError()), "recurses": recurses, "is not async": is_not_async,
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_what_an_extension_raises_is_a_failure(bad: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(ScorerError, match=r"scorer x raised \w+"):
        await contain(bad, "scorer x", ScorerError)
    assert asyncio.current_task() is not None
    await asyncio.sleep(0)


ERRORS = [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), ValueError("v")]


@pytest.mark.parametrize("error", ERRORS)
def test_a_plain_function_is_contained_too(error: BaseException) -> None:
    def bad() -> None:
        raise error

    with pytest.raises(TrajectoryError, match=f"parser raised {type(error).__name__}"):
        contain_call(bad, "parser", TrajectoryError)


async def test_results_and_failures_pass() -> None:
    assert await contain(lambda: asyncio.sleep(0, 7), "a", ScorerError) == 7
    with pytest.raises(EngineError, match=r"^gone$"):
        await contain(raising(EngineError("gone")), "a", ScorerError)


@pytest.mark.parametrize("suppress", [False, True])
async def test_the_cancellation_of_the_caller_passes(suppress: bool) -> None:
    started = asyncio.Event()

    async def waits() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not suppress:
                raise

    task = asyncio.create_task(contain(waits, "a", ScorerError))
    await started.wait()
    await cancel(task)


async def test_a_limit_of_time_passes_also_where_it_is_suppressed() -> None:
    async def suppresses() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await contain(suppresses, "a", ScorerError)


async def test_a_task_that_never_starts_leaves_no_warning() -> None:
    async def starts_and_cancels() -> None:
        asyncio.create_task(exits()).cancel()
        await asyncio.sleep(0)

    await contain(starts_and_cancels, "a", ScorerError)


def test_a_message_is_clean_short_and_without_secrets() -> None:
    text = failure_text(ValueError("\udcff mongodb://u:secret@h " + "x" * 17 * 2**20))
    assert text.startswith("ValueError: ? mongodb://***@h xxx")
    assert len(text) < MESSAGE_CHARS + 100
    assert "more characters]" in text
    text.encode()
    assert "cannot be shown" in failure_text(UnspeakableError())
    assert describe(UnspeakableError()).startswith("UnspeakableError")


def test_what_bson_cannot_hold_is_made_storable() -> None:
    nested: object = 1
    for _ in range(5000):
        nested = [nested]
    value = {"set": {3}, "big": 2**70, "key\0": "\ud800", 4: object, "deep": nested, "nan": float("nan")}
    made = sanitize_bson(value)
    assert made["set"] == [3]
    assert made["big"] == str(2**70)
    assert made["key\ufffd"] == "?"
    assert made["4"] == "<class 'object'>"
    assert "nested too deeply" in str(made["deep"])
