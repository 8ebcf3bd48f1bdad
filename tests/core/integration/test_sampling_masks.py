"""Sampling masks that engines return, refuse, or leave out: a call is trained with one or is context."""

from __future__ import annotations

import pytest
from scripted_engine import Call, ScriptedEngine

from agentrl.documents.model_call import LARGEST, SamplingMask
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import EngineInterruptedError, Generation
from agentrl.inference.session import EngineRouter

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_new_tokens=4, top_p=0.9)
IDS = [1, 2, 3, 4]
KEPT = [[5, 1], [2], [3, 90, 4], [4, 0]]


async def masked(call: Call) -> None:
    await call.head()
    for start in (0, 2):
        part = slice(start, start + 2)
        await call.tokens(
            IDS[part], start + 2, "length" if start else None, output_token_sampling_mask=KEPT[part],
            output_token_sampling_logprobs=[-token / 20 for token in IDS[part]],
        )  # fmt: skip
    await call.done()


async def half_masked(call: Call) -> None:
    await call.head()
    await call.tokens(
        IDS[:2], 2, output_token_sampling_mask=KEPT[:2], output_token_sampling_logprobs=[-0.5, -0.5]
    )
    await call.tokens(IDS[2:], 4, "length")
    await call.done()


async def of_another_token(call: Call) -> None:
    await call.head()
    await call.tokens(
        IDS, 4, "length", output_token_sampling_mask=[[9]] * 4, output_token_sampling_logprobs=[-0.5] * 4
    )
    await call.done()


async def plain(call: Call) -> None:
    await call.head()
    await call.tokens(IDS, 4, "length")
    await call.done()


async def refuses(call: Call) -> None:
    await call.head()
    message = "return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= 100"
    await call.tokens([], 0, finish_reason={"type": "abort", "message": message, "status_code": 400})


async def overflows(call: Call) -> None:
    """SGLang's answer where more ids are tied than its limit holds, behind two tokens."""
    await call.head()
    await call.tokens(
        IDS[:2], 2, output_token_sampling_mask=KEPT[:2], output_token_sampling_logprobs=[-0.5, -0.5]
    )
    message = "Sampling support exceeds --sampling-mask-max-tokens=4096"
    await call.tokens([], 2, finish_reason={"type": "abort", "message": message, "status_code": 400})


async def generated(engine: ScriptedEngine, *, times: int = 1) -> Generation:
    async with engine.serving(), EngineClient(engine.url, 5.0) as client:
        for _ in range(times):
            made = await client.generate([8, 9], PARAMS, "call")
    return made


async def test_a_mask_is_asked_for_and_its_logprobs_are_taken() -> None:
    engine = ScriptedEngine(masked)
    made = await generated(engine)
    assert (made.output_ids, made.logprobs_of) == (tuple(IDS), "truncated")
    assert made.logprobs == pytest.approx([-0.05, -0.1, -0.15, -0.2])
    mask = SamplingMask.unpack(made.sampling_mask, 4)
    assert (mask.counts.tolist(), mask.ids.tolist()) == ([2, 1, 3, 2], [1, 5, 2, 3, 4, 90, 0, 4])
    (sent,) = engine.calls
    assert sent["return_sampling_mask"] is True
    assert (sent["sampling_params"]["top_k"], sent["sampling_params"]["top_p"]) == (LARGEST, 0.9)


async def test_an_engine_that_refuses_masks_generates_without_and_is_not_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = ScriptedEngine(refuses, plain)
    made = await generated(engine, times=2)
    assert (made.output_ids, made.logprobs_of, made.sampling_mask) == (tuple(IDS), "policy", b"")
    assert [call.get("return_sampling_mask", False) for call in engine.calls] == [True, False, False]
    assert caplog.text.count("returns no sampling masks") == 1


async def test_tokens_before_a_refusal_are_kept() -> None:
    engine = ScriptedEngine(overflows, plain)
    async with engine.serving(), EngineClient(engine.url, 5.0) as client:
        with pytest.raises(EngineInterruptedError, match="Sampling support exceeds") as raised:
            await client.generate([8, 9], PARAMS, "call")
        assert raised.value.partial is not None
        assert raised.value.partial.output_ids == (1, 2)
        await client.generate([8, 9], PARAMS, "again")
    assert "return_sampling_mask" not in engine.calls[1]


async def test_an_engine_that_knows_no_masks_is_asked_once() -> None:
    engine = ScriptedEngine(plain)
    made = await generated(engine, times=2)
    assert (made.logprobs_of, made.logprobs[0]) == ("policy", pytest.approx(-0.1))
    assert [call.get("return_sampling_mask", False) for call in engine.calls] == [True, False]


@pytest.mark.parametrize("answer", [half_masked, of_another_token])
async def test_a_mask_that_is_not_whole_leaves_the_call_as_context(answer: object) -> None:
    made = await generated(ScriptedEngine(answer))  # type: ignore[arg-type]
    assert (made.output_ids, made.logprobs_of, made.sampling_mask) == (tuple(IDS), "other", b"")


async def test_a_resumed_generation_has_the_masks_of_its_parts() -> None:
    async def dies(call: Call) -> None:
        await call.head()
        await call.tokens(
            IDS[:2], 2, output_token_sampling_mask=KEPT[:2], output_token_sampling_logprobs=[-0.5, -0.5]
        )

    async def goes_on(call: Call) -> None:
        await call.head()
        await call.tokens(
            IDS[2:], 2, "length", output_token_sampling_mask=KEPT[2:],
            output_token_sampling_logprobs=[-0.5, -0.5],
        )  # fmt: skip
        await call.done()

    async with ScriptedEngine(dies).serving() as first, ScriptedEngine(goes_on).serving() as second:

        async def live() -> list[InferenceService]:
            return [first.service("a"), second.service("b", running_tokens=1)]

        router = EngineRouter(live, wait_seconds=5.0, backoff=0.01)
        async with router.session("t") as session:
            made = await session.generate([8, 9], PARAMS)
        await router.close()
    assert (made.output_ids, made.logprobs_of) == (tuple(IDS), "truncated")
    assert SamplingMask.unpack(made.sampling_mask, 4).counts.tolist() == [2, 1, 3, 2]
