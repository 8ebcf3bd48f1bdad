"""Users' code: what of it data may name, and how what it raises is contained."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Awaitable, Callable
from contextvars import copy_context

import pytest
from waiting import cancel

import agentrl.config.schema as schema
from agentrl.base.user_code import (
    allow,
    call_name,
    code_of_flags,
    contain,
    contain_call,
    describe,
    file_name,
    flags_allowing,
    is_allowed,
    names_outside,
    require_allowed,
    server_name,
)
from agentrl.documents.document import sanitize_bson
from agentrl.errors import ConfigError, EngineError, ScorerError, TrajectoryError
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


def is_allowed_by(allowed: tuple[str, ...], name: str) -> bool:
    def check() -> bool:
        allow(allowed)
        return is_allowed(name)

    return copy_context().run(check)


@pytest.mark.parametrize("name", ["json:dumps", "//host:80", "/etc/passwd", "./a.yml", 'a({"x": 1})'])
def test_everything_is_allowed_until_a_process_names_what_is(name: str) -> None:
    assert is_allowed(name)
    assert not is_allowed_by((), name)
    assert is_allowed_by((name,), name)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("allowed", "name", "expected"),
    [
        ((), "exact", True),
        (("json",), "json:dumps", True),
        (("json",), "json.decoder:scanstring", True),
        (("json.decoder",), "json:dumps", False),
        (("json:dumps",), "json:loads", False),
        (("jso",), "json:dumps", False),
        (("package",), call_name("package", "{}"), True),
        (("package",), call_name("package.games:Chess", "{ }"), False),
        (("package",), call_name("package.games:Chess", "{}"), True),
        (("package",), call_name("package", '{"runtime": "host"}'), False),
        (("package",), call_name("subprocess:Popen", '{"args": "id"}'), False),
        (("package",), call_name("package.x/os", "{}"), False),
        (("package",), call_name("package:x/../os", "{}"), False),
        (("owner/package",), call_name("owner/package", "{}"), True),
        (("package",), "package:os.system", False),
        ((call_name("package", '{"level": 1}'),), call_name("package", '{"level": 1}'), True),
        ((call_name("package", '{"level": 1}'),), call_name("package", '{"level": 2}'), False),
        ((call_name("package", '{"level": 1}'),), call_name("package", "{}"), False),
        (("//games",), server_name("http://games:8000"), True),
        (("//games:8000",), server_name("http://games:8000/reset"), True),
        (("//games:8000",), server_name("http://games:8001"), False),
        (("//games:80",), server_name("http://games"), True),
        (("//games:443",), server_name("wss://GAMES/ws"), True),
        (("//games",), server_name("http://games@evil:80"), False),
        (("//games",), server_name("http://evil\\@games:80"), False),
        (("//games",), server_name("http://games:99999"), False),
        (("//games",), server_name("http://games.evil"), False),
        (("//games",), server_name("games:80@evil"), False),
        (("//games",), server_name("games:x"), False),
        (("//[::1]",), server_name("http://[::1]:8000"), True),
        (("/tasks",), file_name("/tasks/a/b"), True),
        (("/tasks",), file_name("/tasks/../home"), False),
        (("/tasks",), file_name("//tasks/a"), True),
        (("/tasks",), file_name("/tasks2"), False),
        (("./configs",), file_name("configs/agent.yml"), True),
        (("./configs",), file_name("configs/../secret.yml"), False),
        (("./configs",), file_name("../configs/agent.yml"), False),
    ],
)
def test_a_name_is_allowed_where_it_or_what_holds_it_is_listed(
    allowed: tuple[str, ...], name: str, expected: bool
) -> None:
    assert is_allowed_by(allowed, name) is expected


def test_a_relative_file_is_below_the_folder_in_which_the_process_was_started() -> None:
    assert is_allowed_by((os.getcwd(),), file_name("configs/agent.yml"))
    assert not is_allowed_by((f"{os.getcwd()}/configs",), file_name("other/agent.yml"))


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("os:system", "--allowed_modules os"),
        ("package()", "--allowed_modules package"),
        ("//10.0.0.1:80", "--allowed_hosts 10.0.0.1:80"),
        ("/home/user", "--allowed_folders /home/user"),
        ('package({"x": 1})', "agentrl tasks load"),
    ],
)
def test_what_is_refused_is_named_with_the_flag_that_allows_it(name: str, flag: str) -> None:
    def use() -> None:
        allow(())
        require_allowed(name, "thing")

    with pytest.raises(ConfigError) as refused:
        copy_context().run(use)
    assert name in refused.value.message
    assert flag in str(refused.value.hint)
    assert flag in flags_allowing([name]) or "load" in flag


def test_only_names_outside_need_a_permission() -> None:
    outside = {"a.b:c", "//h:1", "./f", "p()"}
    assert names_outside(["exact", "math", *outside]) == outside


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"loss_calculater": "GRPO", "advantage": None, "output_dir": "a:b"}, set()),
        ({"trust_remote_code": False}, set()),
        ({"loss_calculater": "evil:loss"}, {"loss_calculater evil:loss"}),
        ({"tools": "search,evil:a, b.c:d"}, {"tools evil:a", "tools b.c:d"}),
        ({"report_to": ["evil:Tracker"]}, {"report_to evil:Tracker"}),
        ({"import_modules": "evil"}, {"import_modules evil"}),
        ({"trust_remote_code": True}, {"trust_remote_code True"}),
    ],
)
def test_the_code_that_stored_flags_name_is_found(flags: dict[str, object], named: set[str]) -> None:
    assert code_of_flags(flags) == named


def test_every_flag_that_takes_a_path_of_code_is_known() -> None:
    takes_path = {
        item.name
        for group in schema.GROUPS
        for item in dataclasses.fields(group)
        if "module:" in item.metadata.get("help", "") and "tasks may name" not in item.metadata["help"]
    }
    assert len(takes_path) > 5
    assert {name for name in takes_path if code_of_flags({name: "module:name"})} == takes_path
