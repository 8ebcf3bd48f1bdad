"""Engines that die, hang or answer nonsense: no token is lost, none is invented, each end has a name."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from scripted_engine import VOCAB, Answer, Call, ScriptedEngine

from agentrl.config.schema import SamplingConfig
from agentrl.documents.model_call import PartialGeneration, VersionSpan
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ENGINES, ConfigError, EngineError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import EngineAnswerError, EngineInterruptedError, EngineRefusedError, Generation
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.session import EngineRouter

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_new_tokens=8, extra={"sampling_seed": 3})


async def healthy(call: Call) -> None:
    """Continue by 90, 91, … up to the limit."""
    await call.head()
    ids = [90 + place % 10 for place in range(call.max_new_tokens)]
    await call.tokens(ids, len(ids), "length", version="7")
    await call.done()


async def dies(call: Call) -> None:
    await call.head()
    await call.tokens([1], 1, version="5")
    await call.tokens([2, 3], 3, version="5")


async def hangs(call: Call) -> None:
    await dies(call)
    await asyncio.sleep(30)


async def hangs_at_once(call: Call) -> None:
    await asyncio.sleep(30)


async def only_keeps_alive(call: Call) -> None:
    await dies(call)
    for _ in range(100):
        await call.write(b": still here\n\n")
        await asyncio.sleep(0.1)


async def ends_without_a_reason(call: Call) -> None:
    await dies(call)
    await call.done()


async def fails_inside(call: Call) -> None:
    await dies(call)
    await call.event({"error": {"message": "CUDA error", "code": 500}})


async def too_few_logprobs(call: Call) -> None:
    await call.head()
    await call.tokens([1, 2, 3], 3, "stop", output_token_logprobs=[[-0.1, 1, None]])


async def nan_as_null(call: Call) -> None:
    await call.head()
    await call.tokens([1, 2], 2, "stop", output_token_logprobs=[[None, 1, None], [None, 2, None]])


async def nan(call: Call) -> None:
    await call.head()
    await call.tokens([1], 1, "stop", output_token_logprobs=[[float("nan"), 1, None]])


async def a_positive_logprob(call: Call) -> None:
    await call.head()
    await call.tokens([1], 1, "stop", output_token_logprobs=[[3.5, 1, None]])


async def a_foreign_id(call: Call) -> None:
    await call.head()
    await call.tokens([1, VOCAB], 2, "stop")


async def too_many_tokens(call: Call) -> None:
    await call.head()
    await call.tokens(list(range(20)), 20, "length")


async def a_web_page(call: Call) -> None:
    await call.head("text/html")
    await call.write(b"<html><body>please log in</body></html>")


async def garbage(call: Call) -> None:
    await call.head()
    await call.write(b"data: {\xff\xfe not json\n\n")


async def no_events(call: Call) -> None:
    await call.head()
    await call.write(b"\x00\x01\x02 binary nonsense\n")


async def another_shape(call: Call) -> None:
    await call.head()
    await call.event({"text": "hello", "ids": [1]})


async def a_list(call: Call) -> None:
    await call.head("application/json")
    await call.write(b"[1, 2, 3]")


async def unknown_reason(call: Call) -> None:
    await call.head()
    await call.tokens([1], 1, "exploded")


async def spans_with_a_gap(call: Call) -> None:
    await call.head()
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 2, "end": 3}]
    await call.tokens([1, 2, 3], 3, "stop", weight_versions=spans)


async def refuses(call: Call) -> None:
    await call.head()
    await call.event({"error": {"message": "exceeds the context", "code": 400}})


async def one_call(*answers: Answer, timeout: float = 5.0) -> tuple[Generation, ScriptedEngine]:
    async with ScriptedEngine(*answers).serving() as engine, EngineClient(engine.url, timeout) as client:
        return await client.generate([4, 5], PARAMS, "one"), engine


async def routed(*engines: ScriptedEngine, token_timeout: float = 5.0, wait: float = 5.0) -> Generation:
    """One generation over a router; the first engine has the least load."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.serving())
        services = [engine.service(f"e{n}", running_tokens=n) for n, engine in enumerate(engines)]

        async def live() -> Sequence[InferenceService]:
            return services

        router = EngineRouter(live, token_timeout=token_timeout, wait_seconds=wait, backoff=0.01)
        stack.push_async_callback(router.close)
        async with router.session("trajectory", "group") as session:
            return await session.generate([4, 5], PARAMS)


@pytest.mark.parametrize("failing", [dies, ends_without_a_reason, fails_inside])
async def test_the_tokens_of_a_dying_engine_are_kept(failing: Answer) -> None:
    with pytest.raises(EngineInterruptedError) as raised:
        await one_call(failing)
    part = raised.value.partial
    assert part is not None
    assert raised.value.outage == ENGINES
    assert (part.output_ids, part.logprobs, part.finish_reason) == ((1, 2, 3), (-0.1, -0.2, -0.3), "abort")
    assert part.versions == (VersionSpan(version=5, start=0, end=3),)


@pytest.mark.parametrize("failing", [dies, hangs, only_keeps_alive, fails_inside])
async def test_another_engine_continues_where_one_died(failing: Answer) -> None:
    first, second = ScriptedEngine(failing), ScriptedEngine(healthy)
    made = await routed(first, second, token_timeout=0.4)
    assert made.output_ids == (1, 2, 3, 90, 91, 92, 93, 94)
    assert made.logprobs == (-0.1, -0.2, -0.3, -9.0, -9.1, -9.2, -9.3, -9.4)
    assert made.versions == (
        VersionSpan(version=5, start=0, end=3),
        VersionSpan(version=7, start=3, end=8),
    )
    assert (made.finish_reason, made.engine_url, made.prompt_tokens) == ("length", second.url, 2)
    assert second.calls[0]["input_ids"] == [4, 5, 1, 2, 3]
    assert second.calls[0]["sampling_params"]["max_new_tokens"] == 5
    assert second.calls[0]["sampling_params"]["sampling_seed"] == 6
    assert second.headers[0]["x-smg-routing-key"] == "group"
    assert len(first.aborted) <= 1


async def test_a_silent_engine_costs_one_time_out_between_tokens_and_not_the_whole_wait() -> None:
    made = await routed(ScriptedEngine(hangs_at_once), ScriptedEngine(healthy), token_timeout=0.3, wait=20.0)
    assert len(made.output_ids) == 8
    assert made.seconds < 10.0


def test_the_time_out_between_tokens_is_below_the_wait_for_engines() -> None:
    config = SamplingConfig()
    assert config.engine_timeout_seconds < config.engine_wait_seconds
    with pytest.raises(ConfigError, match=r"--engine_timeout_seconds 600 .* --engine_wait_seconds 300"):
        SamplingConfig(engine_timeout_seconds=600.0, engine_wait_seconds=300.0)


BROKEN = {
    too_few_logprobs: "1 logprobs and 3 ids for 3 tokens",
    nan_as_null: "in an unknown format",
    nan: "invalid JSON",
    a_positive_logprob: "logprob 3.5",
    a_foreign_id: "token id 100, outside the vocabulary of 100 ids",
    too_many_tokens: "more than the 8 tokens asked for",
    a_web_page: "please log in",
    garbage: "invalid JSON",
    no_events: "a line that is not an event",
    another_shape: "in an unknown format",
    a_list: "JSON that is not an object",
    unknown_reason: "finish reason 'exploded'",
    spans_with_a_gap: "version spans that do not cover 3 tokens",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda answer: answer.__name__)
async def test_a_malformed_answer_is_named_and_another_engine_answers(broken: Answer) -> None:
    with pytest.raises(EngineAnswerError, match=BROKEN[broken]) as raised:
        await one_call(broken)
    assert raised.value.outage == ENGINES
    made = await routed(ScriptedEngine(broken), ScriptedEngine(healthy))
    assert made.output_ids == (90, 91, 92, 93, 94, 95, 96, 97)


WHOLE = [
    too_few_logprobs, nan_as_null, nan, a_positive_logprob, a_foreign_id, too_many_tokens, another_shape,
    unknown_reason, spans_with_a_gap,
]  # fmt: skip


@pytest.mark.parametrize("broken", WHOLE, ids=lambda answer: answer.__name__)
async def test_a_malformed_answer_that_is_not_streamed_is_named_alike(broken: Answer) -> None:
    async def whole(call: Call) -> None:
        call.is_whole = True
        await broken(call)

    with pytest.raises(EngineAnswerError, match=BROKEN[broken]) as raised:
        await one_call(whole)
    assert raised.value.outage == ENGINES


VLLM_BROKEN = {
    "few": ({"token_ids": [1, 2, 3], "logprobs": {"content": [{"logprob": -1}]}}, "1 logprobs for 3 tokens"),
    "none": ({"token_ids": [1, 2], "logprobs": None}, "0 logprobs for 2 tokens"),
    "null": ({"token_ids": [1], "logprobs": {"content": [{"logprob": None}]}}, "in an unknown format"),
    "nan": ({"token_ids": [1], "logprobs": {"content": [{"logprob": "NaN"}]}}, "logprob nan"),
    "shape": ({"text": "hello"}, "in an unknown format"),
    "foreign": ({"token_ids": [VOCAB], "logprobs": {"content": [{"logprob": -1}]}}, "token id 100"),
}


@pytest.mark.parametrize("name", VLLM_BROKEN)
@pytest.mark.parametrize("is_whole", [False, True], ids=["streamed", "whole"])
async def test_a_malformed_answer_of_vllm_is_named(name: str, is_whole: bool) -> None:
    choice, reason = VLLM_BROKEN[name]

    async def answer(call: Call) -> None:
        call.is_whole = is_whole
        await call.head()
        await call.event({"choices": [{"finish_reason": "stop", **choice}]})

    async with ScriptedEngine(answer).serving() as engine:
        client = engine_client("vllm", engine.url, 5.0, vocab_size=VOCAB)
        with pytest.raises(EngineAnswerError, match=reason):
            await client.generate([4, 5], PARAMS, "one")
        await client.close()


async def test_a_refused_request_is_not_sent_again() -> None:
    engine = ScriptedEngine(refuses)
    with pytest.raises(EngineRefusedError, match="exceeds the context") as raised:
        await routed(engine, ScriptedEngine(healthy))
    assert raised.value.outage is None
    assert len(engine.calls) == 1


async def test_engines_that_all_misbehave_are_an_outage() -> None:
    with pytest.raises(EngineError, match=r"no new token for 0\.3 s") as raised:
        await routed(ScriptedEngine(a_web_page), wait=0.3)
    assert raised.value.outage == ENGINES


async def test_an_engine_with_another_tokenizer_gets_no_calls() -> None:
    engine = ScriptedEngine(healthy)
    async with engine.serving():
        services = [engine.service("foreign", tokenizer="sha256 b")]

        async def live() -> Sequence[InferenceService]:
            return services

        router = EngineRouter(live, wait_seconds=0.2, backoff=0.01, max_age=0.0, tokenizer="sha256 a")
        async with router.session("t") as session:
            with pytest.raises(EngineError, match="another tokenizer") as raised:
                await session.generate([4], PARAMS)
            assert raised.value.outage == ENGINES
            assert "same --model_name_or_path" in str(raised.value.hint)
            services[0] = engine.service("same", tokenizer="sha256 a")
            assert len((await session.generate([4], PARAMS)).output_ids) == 8
        await router.close()


async def test_a_cancelled_generation_is_kept_and_resumed_on_newer_weights_with_its_spans() -> None:
    first, second = ScriptedEngine(hangs), ScriptedEngine(healthy)
    async with first.serving(), second.serving():
        services = [first.service("first")]

        async def live() -> Sequence[InferenceService]:
            return services

        router = EngineRouter(live, max_age=0.0)
        async with router.session("t") as session:
            task = asyncio.create_task(session.generate([4, 5], PARAMS))
            async with asyncio.timeout(10):
                while not first.calls:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            kept = session.partial
        assert kept is not None
        stored = PartialGeneration.from_document(kept.to_document())
        services[0] = second.service("second")
        async with router.session("t2", partial=stored) as session:
            assert (await session.generate([9, 9], PARAMS)).output_ids[0] == 90, "another prompt"
        async with router.session("t3", partial=stored) as session:
            made = await session.generate([4, 5], PARAMS)
            again = await session.generate([4, 5], PARAMS)
        await router.close()
    assert made.output_ids == (1, 2, 3, 90, 91, 92, 93, 94)
    assert made.logprobs[:3] == pytest.approx((-0.1, -0.2, -0.3))
    assert [(span.version, span.start, span.end) for span in made.versions] == [(5, 0, 3), (7, 3, 8)]
    assert again.output_ids == (90, 91, 92, 93, 94, 95, 96, 97)
