"""The router chooses engines and resumes generations; the engines follow scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import pytest
from rollout_fakes import END, END_OF_TEXT, format_of

from agentrl.chat.chat_format import ChatFormat
from agentrl.columns.outages import Outages
from agentrl.documents.model_call import VersionSpan
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ServiceStatus
from agentrl.errors import ENGINES, EngineError
from agentrl.inference.engine import FinishReason, Generation
from agentrl.inference.session import EngineRouter, GenerationParts

Answer = Generation | EngineError


def service(name: str, **fields: object) -> InferenceService:
    values = {"status": ServiceStatus.READY, "policy_version": 0, **fields}
    kind = {"url": f"http://{name}", "engine": "local", "model": "m", "host": "h", "pid": 1}
    return InferenceService(id=name, **kind, **values)  # type: ignore[arg-type]


def part(url: str, ids: Sequence[int], reason: str = "stop", version: int = 0) -> Generation:
    versions = (VersionSpan(version=version, start=0, end=len(ids)),) if ids else ()
    return Generation(
        output_ids=tuple(ids), logprobs=tuple(-float(item) for item in ids), versions=versions,
        finish_reason=cast("FinishReason", reason), prompt_tokens=2, cached_tokens=1, seconds=0.1,
        engine_url=url,
    )  # fmt: skip


class Scripted:
    """An engine that returns the answers of its script, then one token per call."""

    def __init__(self, url: str, script: Sequence[Answer] = ()) -> None:
        self.url = url
        self.script = list(script)
        self.calls: list[tuple[list[int], SamplingParams, str]] = []
        self.closed = False

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, rid: str, **_: object
    ) -> Generation:
        self.calls.append((list(input_ids), params, rid))
        answer = self.script.pop(0) if self.script else part(self.url, [7])
        if isinstance(answer, EngineError):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed = True


class Fleet:
    def __init__(
        self, *services: InferenceService, scripts: Mapping[str, Sequence[Answer]] | None = None
    ) -> None:
        self.services = list(services)
        self.engines: dict[str, Scripted] = {}
        self.scripts = dict(scripts or {})
        self.asked = 0
        self.asked_twice = asyncio.Event()

    async def live(self) -> list[InferenceService]:
        self.asked += 1
        if self.asked == 2:
            self.asked_twice.set()
        return self.services

    def client(self, service: InferenceService) -> Scripted:
        name = service.url.removeprefix("http://")
        self.engines[name] = Scripted(service.url, self.scripts.get(name, ()))
        return self.engines[name]

    def router(self, tokens: ChatFormat | None = None, **options: float) -> EngineRouter:
        settings = {"wait_seconds": 5.0, "max_age": 0.0, "backoff": 0.001, "suspect_seconds": 60.0, **options}
        return EngineRouter(self.live, client=self.client, tokens=tokens, **settings)  # type: ignore[arg-type]


PARAMS = SamplingParams(max_new_tokens=10)


async def test_waiting_for_the_first_engine_is_no_outage_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet(service("a", status=ServiceStatus.STARTING))
    outages, changed = Outages(), asyncio.Event()
    outages.changed = changed.set
    router = fleet.router(outages=outages, max_age=0.0)  # type: ignore[arg-type]
    with caplog.at_level("INFO", logger="agentrl"):
        async with router.session("t") as session, asyncio.timeout(10):
            waiting = asyncio.create_task(session.generate([1], PARAMS))
            await changed.wait()
            await asyncio.sleep(0.02)
            assert [breaker.is_awaited for breaker in outages.open] == [True]
            assert outages.blocks_claims(1)
            fleet.services = [service("a")]
            await waiting
            assert outages.open == []
            assert [record.levelname for record in caplog.records] == ["INFO"]
            changed.clear()
            fleet.services = []
            waiting = asyncio.create_task(session.generate([1], PARAMS))
            await changed.wait()
            assert [breaker.is_awaited for breaker in outages.open] == [False]
            fleet.services = [service("a")]
            await waiting
    outages.close()
    await router.close()


async def test_trajectories_spread_over_engines_and_stick_to_theirs() -> None:
    fleet = Fleet(service("a"), service("b"))
    router = fleet.router()
    async with router.session("t1") as one, router.session("t2") as two:
        for _ in range(3):
            await one.generate([1, 2], PARAMS)
            await two.generate([1, 2], PARAMS)
        assert one.url != two.url
    assert [len(engine.calls) for engine in fleet.engines.values()] == [3, 3]


async def test_reported_load_and_status_decide_for_a_new_trajectory() -> None:
    fleet = Fleet(
        service("a", running_requests=9), service("b", running_requests=2),
        service("c", status=ServiceStatus.UPDATING), service("d", status=ServiceStatus.STARTING),
    )  # fmt: skip
    async with fleet.router().session("t") as session:
        assert (await session.generate([1], PARAMS)).engine_url == "http://b"


async def test_an_engine_that_has_its_number_of_trajectories_comes_last() -> None:
    fleet = Fleet(service("a"), service("b", running_tokens=500))
    router = fleet.router()
    router.limits = {"http://a": 1, "http://b": 2}
    sessions = [router.session(f"t{number}") for number in range(4)]
    opened = [await each.__aenter__() for each in sessions]
    for session in opened:
        await session.generate([1, 2], PARAMS)
    assert [session.url for session in opened] == ["http://a", "http://b", "http://b", "http://a"]
    held, tokens = router.held()
    assert held == {"http://a": 2, "http://b": 2}
    assert tokens == {"http://a": 6, "http://b": 6}
    for each in sessions:
        await each.__aexit__(None, None, None)
    assert router.held() == ({}, {})


async def test_a_front_router_gets_no_calls_while_one_of_its_engines_has_another_tokenizer() -> None:
    fleet = Fleet(service("a", tokenizer="sha256 a"), service("b", tokenizer="sha256 b"))
    options = {"router_url": "http://127.0.0.1:9", "tokenizer": "sha256 a", "wait_seconds": 0.02}
    router = fleet.router(**options)  # type: ignore[arg-type]
    async with router.session("t") as session:
        with pytest.raises(EngineError, match=r"http://b serves .* another tokenizer") as raised:
            await session.generate([1], PARAMS)
    assert raised.value.outage == ENGINES
    assert "same --model_name_or_path" in str(raised.value.hint)
    await router.close()


async def test_an_aborted_generation_continues_from_its_tokens_with_all_version_spans() -> None:
    script = [
        part("http://a", [11, 12], "abort", version=1),
        part("http://a", [], "abort", version=2),
        part("http://a", [13], "abort", version=1),
        part("http://a", [14, 15], "stop", version=2),
    ]
    fleet = Fleet(service("a"), scripts={"a": script})
    params = SamplingParams(max_new_tokens=10, extra={"sampling_seed": 5})
    async with fleet.router().session("t") as session:
        whole = await session.generate([1, 2], params)
    assert whole.output_ids == (11, 12, 13, 14, 15)
    assert whole.logprobs == (-11.0, -12.0, -13.0, -14.0, -15.0)
    assert whole.versions == (VersionSpan(version=1, start=0, end=3), VersionSpan(version=2, start=3, end=5))
    assert (whole.finish_reason, whole.prompt_tokens) == ("stop", 2)
    calls = fleet.engines["a"].calls
    assert [call[0] for call in calls] == [[1, 2], [1, 2, 11, 12], [1, 2, 11, 12], [1, 2, 11, 12, 13]]
    assert [call[1].max_new_tokens for call in calls] == [10, 8, 8, 7]
    assert [call[1].extra["sampling_seed"] for call in calls] == [5, 7, 7, 8]
    assert len({call[2] for call in calls}) == 4


async def test_an_abort_at_the_last_token_is_a_length_stop() -> None:
    fleet = Fleet(service("a"), scripts={"a": [part("http://a", range(10), "abort")]})
    async with fleet.router().session("t") as session:
        assert (await session.generate([1], PARAMS)).finish_reason == "length"


TEXT = format_of().tokens.encode("no more\n")


@pytest.mark.parametrize(
    ("ids", "params", "ended"),
    [
        ([11, 12], SamplingParams(stop_token_ids=(12,)), True),
        ([12, 11], SamplingParams(stop_token_ids=(12,)), False),
        ([11, END], SamplingParams(), True),
        ([11, END_OF_TEXT], SamplingParams(stop_token_ids=(12,)), True),
        ([11, END], SamplingParams(extra={"ignore_eos": True}), False),
        ([11, 12], SamplingParams(stop_token_ids=(12,), extra={"ignore_eos": True}), False),
        (TEXT, SamplingParams(extra={"stop": "more"}), True),
        (TEXT, SamplingParams(extra={"stop": ["less", "re\n"], "ignore_eos": True}), True),
        (TEXT, SamplingParams(extra={"stop": ["m.re"]}), False),
        (TEXT, SamplingParams(extra={"stop_regex": "m.re"}), True),
        (range(10), SamplingParams(max_new_tokens=10, stop_token_ids=(9,)), True),
    ],
)
async def test_an_abort_behind_a_stop_is_a_stop(
    ids: Sequence[int], params: SamplingParams, ended: bool
) -> None:
    fleet = Fleet(service("a"), scripts={"a": [part("http://a", ids, "abort"), part("http://a", [], "stop")]})
    async with fleet.router(format_of()).session("t") as session:
        whole = await session.generate([1], params)
    assert (list(whole.output_ids), whole.finish_reason) == (list(ids), "stop")
    assert len(fleet.engines["a"].calls) == (1 if ended else 2)


@pytest.mark.parametrize(
    ("second", "joined"), [("sampled", "sampled"), ("policy", "other"), ("other", "other")]
)
async def test_parts_of_two_distributions_have_logprobs_of_other(second: str, joined: str) -> None:
    script = [
        replace(part("http://a", [11], "abort"), logprobs_of="sampled"),
        replace(part("http://a", [], "abort"), logprobs_of="policy"),
        replace(part("http://a", [12]), logprobs_of=second),  # type: ignore[arg-type]
        replace(part("http://a", []), logprobs_of="policy"),
    ]
    fleet = Fleet(service("a"), scripts={"a": script})
    async with fleet.router().session("t") as session:
        assert (await session.generate([1], PARAMS)).logprobs_of == joined
        assert (await session.generate([1], PARAMS)).logprobs_of == "policy"


async def test_a_part_without_tokens_does_not_end_where_the_prompt_did() -> None:
    fleet = Fleet(service("a"), scripts={"a": [part("http://a", [], "abort")]})
    async with fleet.router(format_of()).session("t") as session:
        assert (await session.generate([1, END], PARAMS)).output_ids == (7,)


async def test_a_failed_engine_is_avoided_and_its_partial_result_kept() -> None:
    script: list[Answer] = [part("http://a", [11], "abort"), EngineError("gone")]
    fleet = Fleet(service("a"), service("b", running_requests=1), scripts={"a": script})
    router = fleet.router()
    async with router.session("t") as session:
        whole = await session.generate([1], PARAMS)
        assert whole.output_ids == (11, 7)
        assert session.url == "http://b"
    assert fleet.engines["b"].calls[0][0] == [1, 11]


@pytest.mark.parametrize("engines", ["none", "failing"])
async def test_waiting_for_an_engine_ends_in_an_error_with_a_hint(engines: str) -> None:
    failing: list[Answer] = [EngineError("no") for _ in range(99)]
    fleet = Fleet() if engines == "none" else Fleet(service("a"), scripts={"a": failing})
    async with fleet.router(wait_seconds=0.05, suspect_seconds=0.0).session("t") as session:
        with pytest.raises(EngineError, match="engine_wait_seconds") as caught:
            await session.generate([1], PARAMS)
    assert "agentrl serve" in str(caught.value)


async def test_an_engine_that_appears_while_waiting_is_used() -> None:
    fleet = Fleet()
    async with fleet.router().session("t") as session:
        call = asyncio.create_task(session.generate([1], PARAMS))
        await asyncio.wait_for(fleet.asked_twice.wait(), 5)
        fleet.services.append(service("late"))
        assert (await call).engine_url == "http://late"


async def test_calls_wait_without_limit_while_the_trainer_has_every_device() -> None:
    lent = service("a", status=ServiceStatus.LENT, policy_version=3)
    fleet = Fleet(lent, scripts={"a": [EngineError("no")]})
    outages, held = Outages(), list[str]()
    router = fleet.router(outages=outages, wait_seconds=0.1, suspect_seconds=0.0)  # type: ignore[arg-type]

    @contextmanager
    def clock() -> Iterator[None]:
        held.append("stopped")
        yield
        held.append("goes on")

    async with asyncio.timeout(10), router.session("t", held=clock) as session:
        call = asyncio.create_task(session.generate([1], PARAMS))
        await asyncio.sleep(0.2)
        assert router.engines.policy_versions() == {3}
        assert not call.done()
        fleet.services = [service("b"), service("a", status=ServiceStatus.LENT)]
        assert (await call).engine_url == "http://b"
        assert held == ["stopped", "goes on"]
        fleet.services = [service("a")]  # its first call fails: the time of the wait did not count
        assert (await session.generate([1], PARAMS)).engine_url == "http://a"
    assert outages.open == []
    await router.close()


async def test_an_engine_that_stops_heartbeating_is_replaced() -> None:
    fleet = Fleet(service("a"))
    async with fleet.router().session("t") as session:
        await session.generate([1], PARAMS)
        fleet.services[:] = [service("b")]
        assert (await session.generate([1], PARAMS)).engine_url == "http://b"


async def test_the_client_of_an_engine_that_has_ended_is_closed() -> None:
    fleet = Fleet(service("a"), service("b"))
    router = fleet.router()
    async with router.session("t") as first, router.session("u") as second:
        for session in (first, second):
            await session.generate([1], PARAMS)
        fleet.services[:] = [service("b"), service("c")]
        for session in (first, second):
            await session.generate([1], PARAMS)
    assert {name: engine.closed for name, engine in fleet.engines.items()} == {
        "a": True, "b": False, "c": False,
    }  # fmt: skip


async def test_the_list_of_engines_is_cached() -> None:
    fleet = Fleet(service("a"))
    router = fleet.router(max_age=60.0)
    async with router.session("t") as session:
        await asyncio.gather(*(session.generate([1], PARAMS) for _ in range(8)))
    assert fleet.asked == 1


async def test_a_call_does_not_wait_for_a_newer_list_of_engines() -> None:
    fleet = Fleet(service("a"))
    router = fleet.router(max_age=60.0)
    async with asyncio.timeout(10), router.session("t") as session:
        fleet.services[:] = [service("b")]
        router.engines._refreshed_at -= 100.0
        assert (await session.generate([1], PARAMS)).engine_url == "http://a"
        await fleet.asked_twice.wait()
        assert (await session.generate([1], PARAMS)).engine_url == "http://b"
        fleet.services[:] = [service("c")]
        router.engines._refreshed_at -= 1000.0
        assert (await session.generate([1], PARAMS)).engine_url == "http://c"


async def test_the_versions_of_the_usable_engines_are_known() -> None:
    versions = {"a": 4, "b": 3, "c": None}
    fleet = Fleet(*(service(name, policy_version=version) for name, version in versions.items()))
    router = fleet.router()
    assert router.engines.policy_versions() == frozenset()
    async with router.session("t") as session:
        await session.generate([1], PARAMS)
    assert router.engines.policy_versions() == {3, 4}


async def test_the_versions_are_kept_fresh_without_any_generation() -> None:
    fleet = Fleet(service("a", policy_version=1))
    router = fleet.router()
    assert router.engines.policy_versions() == frozenset()
    await asyncio.sleep(0)
    assert router.engines.policy_versions() == {1}
    fleet.services[:] = [service("a", policy_version=2)]
    await asyncio.wait_for(fleet.asked_twice.wait(), 5)
    assert router.engines.policy_versions() == {2}
    await router.close()


async def test_close_closes_every_client() -> None:
    fleet = Fleet(service("a"))
    router = fleet.router()
    async with router.session("t") as session:
        await session.generate([1], PARAMS)
    await router.close()
    assert all(engine.closed for engine in fleet.engines.values())


def cached_part(*ids: int, cached: int, reason: FinishReason = "abort") -> Generation:
    spans = (VersionSpan(version=1, start=0, end=len(ids)),) if ids else ()
    return Generation(
        output_ids=ids, logprobs=(-0.5,) * len(ids), versions=spans,
        finish_reason=reason, prompt_tokens=2, cached_tokens=cached, seconds=0.0, engine_url="",
    )  # fmt: skip


def test_a_part_without_tokens_does_not_say_what_was_cached() -> None:
    made = GenerationParts([1, 2], SamplingParams(max_new_tokens=9), None, None)
    made.add(cached_part(cached=0))
    made.add(cached_part(3, 4, cached=7))
    kept = made.kept()
    assert kept is not None
    assert kept.cached_tokens == 7
    assert made.whole(0.0).cached_tokens == 0
