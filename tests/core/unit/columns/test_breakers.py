"""Circuit breakers and held calls: what is down is probed by one call, and no attempt is used up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from waiting import until

from agentrl.base.concurrency import background
from agentrl.columns import outages as breaker_module
from agentrl.columns.outages import (
    LONGEST_PAUSE_SECONDS,
    LOST_SESSIONS,
    OPEN_AFTER,
    OWN_FAILURES,
    Breaker,
    Clock,
    Outages,
)
from agentrl.errors import (
    ENGINES,
    Dependency,
    DependencyKind,
    FailureError,
    ScorerError,
    ServerFullError,
    SessionLostError,
    ToolServerError,
    judge,
    tool_server,
)
from agentrl.llm.agent_config import ModelEndpoint
from agentrl.llm.chat import EndpointLimits

SEARCH = tool_server("search")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker_module, "FIRST_PROBE_SECONDS", 0.01)
    monkeypatch.setattr(breaker_module, "LONGEST_PROBE_SECONDS", 0.02)


@pytest.fixture
async def outages() -> AsyncIterator[Outages]:
    opened = Outages()
    yield opened
    opened.close()


def fail(breaker: Breaker, times: int = OPEN_AFTER, **how: float) -> None:
    for _ in range(times):
        breaker.failed("refused", **how)


class Server:
    """A tool server that is down until it is started; counts the calls that reach it."""

    def __init__(self) -> None:
        self.is_up = False
        self.calls = 0
        self.in_flight = 0
        self.most_in_flight = 0

    async def call(self) -> str:
        self.calls += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        if not self.is_up:
            raise ToolServerError("connection refused", outage=SEARCH)
        return "found"


async def hold(outages: Outages, call: Callable[[], object], seconds: float = 5.0) -> object:
    clock = Clock()
    async with clock.limit(seconds):
        return await outages.hold(call, clock)  # type: ignore[arg-type]


async def test_what_has_not_come_up_yet_is_awaited_without_a_warning_until_a_call_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    breaker = Breaker(SEARCH, lambda: None)
    breaker.not_up_yet()
    breaker.not_up_yet()
    assert (breaker.is_open, breaker.is_awaited) == (True, True)
    breaker.succeeded()
    assert (breaker.is_open, breaker.is_awaited) == (False, False)
    assert caplog.records == []
    breaker.not_up_yet()
    breaker.failed("no engine for 300 s")
    assert (breaker.is_open, breaker.is_awaited) == (True, False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    breaker.close()


async def test_outages_that_are_stored_leave_out_what_is_awaited(
    outages: Outages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[list[Breaker]] = []

    async def write(self: object, down: list[Breaker]) -> None:
        stored.append(down)

    outages.breaker(SEARCH).not_up_yet()
    monkeypatch.setattr(breaker_module._Reports, "write", write)
    async with background(breaker_module.report_outages(None, lambda: outages.open, "a")):  # type: ignore[arg-type]
        await until(lambda: bool(stored))
    assert stored[0] == []


async def test_a_breaker_opens_after_consecutive_failures_only() -> None:
    changes: list[bool] = []
    breaker = Breaker(SEARCH, lambda: changes.append(breaker.is_open))
    fail(breaker, OPEN_AFTER - 1)
    breaker.succeeded()
    fail(breaker, OPEN_AFTER - 1)
    assert not breaker.is_open
    breaker.failed("refused again")
    assert (breaker.is_open, breaker.why) == (True, "refused again")
    breaker.succeeded()
    assert not breaker.is_open
    assert changes == [True, False]


async def test_calls_are_held_while_their_server_is_down_and_one_at_a_time_probes(outages: Outages) -> None:
    server = Server()
    held = [asyncio.create_task(hold(outages, server.call)) for _ in range(20)]
    await until(lambda: bool(outages.open) and outages.open[0].held >= 19)
    reached, server.most_in_flight = server.calls, 0
    await until(lambda: server.calls >= reached + 3)
    assert server.most_in_flight == 1
    server.is_up = True
    assert await asyncio.gather(*held) == ["found"] * 20
    assert outages.open == []


async def test_probes_go_round_so_that_a_call_that_always_fails_holds_nobody_up(outages: Outages) -> None:
    server = Server()
    poison = asyncio.create_task(hold(outages, Server().call))
    await until(lambda: bool(outages.open))
    server.is_up = True
    assert await hold(outages, server.call) == "found"
    poison.cancel()
    await asyncio.gather(poison, return_exceptions=True)


@pytest.mark.parametrize("end", ["an error of its own", "cancelled"])
async def test_a_probe_that_ends_in_another_way_keeps_no_other_from_probing(
    outages: Outages, end: str
) -> None:
    server, probes = Server(), asyncio.Event()

    async def first() -> object:
        if not outages.breaker(SEARCH).held:
            return await server.call()  # nobody else waits yet
        server.is_up = True
        probes.set()
        if end == "cancelled":
            await asyncio.sleep(60)
        raise FailureError("too long")

    probing, other = (asyncio.create_task(hold(outages, call)) for call in (first, server.call))
    await probes.wait()
    if end == "cancelled":
        probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    assert await asyncio.wait_for(other, 5) == "found"


async def test_a_call_that_fails_while_others_are_served_is_the_trajectorys_own_failure(
    outages: Outages,
) -> None:
    attempts = 0

    async def crash() -> None:
        nonlocal attempts
        attempts += 1
        outages.breaker(SEARCH).succeeded()  # another trajectory's call
        await Server().call()

    with pytest.raises(ToolServerError) as error:
        await hold(outages, crash)
    assert error.value.outage is None
    assert attempts == OWN_FAILURES + 1


async def test_a_call_is_given_back_after_the_wait_and_still_names_the_outage() -> None:
    outages = Outages(wait_seconds=0.05)
    with pytest.raises(ToolServerError) as error:
        await hold(outages, Server().call)
    assert error.value.outage == SEARCH


async def test_the_clock_of_a_trajectory_stands_still_while_it_is_held(outages: Outages) -> None:
    server = Server()
    asyncio.get_running_loop().call_later(0.3, setattr, server, "is_up", True)
    assert await hold(outages, server.call, seconds=0.1) == "found"
    with pytest.raises(TimeoutError):
        await hold(outages, lambda: asyncio.sleep(5), seconds=0.05)


async def test_an_error_without_an_outage_passes_at_once(outages: Outages) -> None:
    async def refuse() -> None:
        raise FailureError("too long")

    with pytest.raises(FailureError, match="too long"):
        await hold(outages, refuse)


GAMES = Dependency(DependencyKind.ENVIRONMENT, "http://a")


async def test_a_lost_session_ends_its_trajectory_at_once_and_often_lost_ones_are_its_own_fault(
    outages: Outages,
) -> None:
    async def lose() -> None:
        error = SessionLostError("closed")
        error.outage = GAMES
        raise error

    for _ in range(OPEN_AFTER):
        with pytest.raises(SessionLostError) as caught:
            await hold(outages, lose)
        assert caught.value.outage == GAMES
    assert outages.needs_down().environments == {"http://a"}
    losses = [outages.count_lost_session("train/0/a", 0) for _ in range(LOST_SESSIONS)]
    assert losses[-2:] == [False, True]
    assert not outages.count_lost_session("train/0/a", 1), "another slot of the task has lost one"


async def test_a_full_server_is_asked_again_and_no_trajectory_is_to_blame(outages: Outages) -> None:
    refusals = iter(range(OWN_FAILURES + 2))

    async def ask() -> str:
        if next(refusals, None) is None:
            return "seat"
        outages.breaker(GAMES).succeeded()
        error = ServerFullError("no free session", sessions=2)
        error.outage = GAMES
        raise error

    assert await hold(outages, ask) == "seat"
    assert outages.open == []


def lose_judge(outages: Outages) -> None:
    for _ in range(OPEN_AFTER):
        outages.scorer_failed("agentcpm", ScorerError("429", outage=judge("gpt")))


async def test_claims_leave_out_what_is_down_until_a_probe_is_due(
    outages: Outages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker_module, "FIRST_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(breaker_module, "LONGEST_PROBE_SECONDS", 0.1)
    fail(outages.breaker(SEARCH))
    lose_judge(outages)
    needs = outages.needs_down()
    assert (needs.servers, needs.scorers) == ({"search"}, {"agentcpm"})
    await until(lambda: not outages.needs_down().servers)
    outages.begin_probes("train/0/a/0/1", ("search",), "exact")
    assert outages.needs_down().servers == {"search"}
    outages.breaker(SEARCH).succeeded()
    outages.scorer_succeeded("agentcpm")
    assert outages.open == []


async def test_nothing_is_claimed_while_the_engines_are_down_and_trajectories_wait_for_them(
    outages: Outages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker_module, "FIRST_PROBE_SECONDS", 0.05)
    monkeypatch.setattr(breaker_module, "LONGEST_PROBE_SECONDS", 0.05)
    assert not outages.blocks_claims(running=3)
    fail(outages.breaker(ENGINES))
    assert outages.blocks_claims(running=0)
    await until(lambda: not outages.blocks_claims(running=0))
    assert outages.blocks_claims(running=3)


async def test_a_breaker_waits_as_long_as_the_dependency_asked() -> None:
    breaker = Breaker(judge("gpt"), lambda: None)
    fail(breaker, retry_after=0.2)
    await asyncio.sleep(0.1)
    assert not breaker.probe_is_due
    await until(lambda: breaker.probe_is_due)
    breaker.close()


@pytest.mark.attack
async def test_no_dependency_may_ask_for_more_than_an_hour() -> None:
    breaker = Breaker(judge("gpt"), lambda: None)
    limits = EndpointLimits(ModelEndpoint(model="gpt", base_url="http://judge", api_key=""))
    for asked in (9e99, float("inf"), float("nan")):
        limits.pause(asked)
        fail(breaker, retry_after=asked)
    assert breaker._probe_at <= time.monotonic() + LONGEST_PAUSE_SECONDS
    assert limits.paused_seconds() <= LONGEST_PAUSE_SECONDS
    breaker.close()


async def test_a_judge_is_probed_by_what_waits_for_a_score_and_else_by_the_trajectory_that_was_chosen(
    outages: Outages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.columns.outages._QUEUE_SECONDS", 0.2)
    lose_judge(outages)
    await until(lambda: not outages.needs_down().scorers)
    assert outages.needs_down(of_new=True).scorers == {"agentcpm"}
    await until(lambda: not outages.needs_down(of_new=True).scorers)
    outages.begin_probes("chosen", None, "agentcpm")
    assert outages.needs_down(of_new=True).scorers == {"agentcpm"}
    assert outages.needs_down("another").scorers == {"agentcpm"}
    assert outages.needs_down("chosen").scorers == frozenset()
