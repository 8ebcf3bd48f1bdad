"""The routing of a mixture: complete or left out, whatever engines answer; and replayed in training."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scripted_engine import Answer, Call, ScriptedEngine
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.data.forest import ForestRouting, forest_from_sequences
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.model_call import ExpertShape, free_routing, routed_tokens, unpack_routing
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ConfigError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import Generation
from agentrl.inference.engines.commands import EngineProcess, engine_command, free_port
from agentrl.inference.session import EngineRouter
from agentrl.model.logprobs import ForwardOptions
from agentrl.model.routing import RouterReplay
from agentrl.weights.folder import expert_shape

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.usefixtures("starts_warm")]

SHAPE = ExpertShape(layers=3, top_k=4, experts=16)
VOCAB = 256
PARAMS = SamplingParams(max_new_tokens=8)


def encoded(tokens: int, shape: ExpertShape = SHAPE, first: int = 0) -> str:
    """An answer's routing, in which token i of the request has the experts i + 0 to k − 1."""
    experts = first + np.arange(tokens)[:, None, None] + np.zeros((1, shape.layers, 1), int)
    experts = (experts + np.arange(shape.top_k)) % shape.experts
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()


def answer(ids: list[int], reason: str, routing: Any = "whole") -> Answer:
    """The generation ``ids``; ``routing``: what it returns for the tokens that are asked for."""

    async def send(call: Call) -> None:
        start = call.body["routed_experts_start_len"]
        tokens = len(call.ids) + len(ids) - 1 - start
        known = encoded(tokens, first=start) if routing == "whole" else routing
        await call.head()
        await call.tokens(ids, len(ids), reason, **({} if known is None else {"routed_experts": known}))
        await call.done()

    return send


async def generated(*answers: Answer, routed_from: int = 2) -> tuple[Generation, list[int]]:
    """The generation of a session, and where each of its requests wanted the routing to start."""
    async with ScriptedEngine(*answers).serving() as engine:

        async def live() -> list[Any]:
            return [engine.service("e")]

        router = EngineRouter(live, experts=SHAPE, backoff=0.01, vocab_size=VOCAB)
        async with router.session("t") as session:
            made = await session.generate([1, 2, 3, 4], PARAMS, routed_from=routed_from)
        await router.close()
        return made, [call["routed_experts_start_len"] for call in engine.calls]


async def test_parts_of_a_generation_have_one_routing() -> None:
    made, starts = await generated(answer([5, 6], "abort"), answer([7], "abort"), answer([8], "stop"))
    assert made.output_ids == (5, 6, 7, 8)
    assert starts == [2, 5, 6]
    found = unpack_routing(made.routing, SHAPE)
    assert found[:, 0, 0].tolist() == [2, 3, 4, 5, 6]


async def test_a_part_asks_for_what_the_parts_before_it_lack() -> None:
    made, starts = await generated(answer([5, 6], "abort", None), answer([7], "stop"))
    assert starts == [2, 2]
    assert routed_tokens(made.routing) == 4 + 3 - 1 - 2


@pytest.mark.parametrize(
    "routing",
    [None, encoded(2), encoded(4), encoded(3, ExpertShape(layers=3, top_k=4, experts=99), first=90), "?", 5],
)
async def test_a_generation_without_its_whole_routing_has_none_and_one_warning(
    routing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = await generated(answer([5, 6], "stop", routing))
    assert (made.output_ids, made.routing) == ((5, 6), b"")
    told = [record.message for record in caplog.records if "routed experts" in record.message]
    assert len(told) == 1


async def test_the_routing_of_all_tokens_is_cut_to_those_that_are_asked_for() -> None:
    made, _ = await generated(answer([5, 6], "stop", encoded(5)))
    assert unpack_routing(made.routing, SHAPE)[:, 0, 0].tolist() == [2, 3, 4]


async def test_no_routing_is_asked_for_that_an_answer_could_not_hold() -> None:
    wide = ExpertShape(layers=10_000, top_k=100, experts=128)
    async with ScriptedEngine(answer_plain).serving() as engine:
        async with EngineClient(engine.url, 5.0, vocab_size=VOCAB, experts=wide) as client:
            made = await client.generate([1], SamplingParams(max_new_tokens=60), "one", routed_from=0)
        assert "return_routed_experts" not in engine.calls[0]
    assert made.routing == b""


async def answer_plain(call: Call) -> None:
    await call.head()
    await call.tokens([5], 1, "stop")
    await call.done()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random mixture in float32, whose experts matter: of 16, 4 for each token in 3 layers."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4,
        max_position_embeddings=512, norm_topk_prob=True, eos_token_id=None, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(folder)
    assert expert_shape(json.loads((folder / "config.json").read_text())) == SHAPE
    return str(folder)


@pytest.fixture(scope="module", params=["local", pytest.param("sglang", marks=pytest.mark.sglang)])
def served(request: pytest.FixtureRequest, mixture: str, tmp_path_factory: Any) -> Iterator[tuple[str, str]]:
    """The kind and the URL of a server of the mixture; SGLang computes in bfloat16."""
    config = EngineConfig(engine=request.param, max_total_tokens=8192, inf_mem_ratio=0.1)
    if request.param == "sglang":
        config = replace(config, engine_args="--dtype bfloat16 --skip-tokenizer-init")
    port = free_port(config.host)
    try:
        command = engine_command(mixture, ModelConfig(), config, port)
    except ConfigError as error:
        if request.param in os.environ.get("AGENTRL_REQUIRE_ENGINES", "").split(","):
            raise
        pytest.skip(str(error))
    process = EngineProcess(command, tmp_path_factory.mktemp(request.param) / "engine.log")
    address = f"http://{config.host}:{port}"

    async def ready() -> None:
        async with EngineClient(address) as client:
            await process.wait_ready(client, 200.0)

    asyncio.run(ready())
    yield request.param, address
    asyncio.run(process.stop())


async def test_an_engine_returns_the_experts_that_it_used(served: tuple[str, str], mixture: str) -> None:
    kind, url = served
    prompts = [np.random.default_rng(seed).integers(0, VOCAB, 8).tolist() for seed in range(16)]
    params = SamplingParams(max_new_tokens=64, extra={"ignore_eos": True})
    async with EngineClient(url, vocab_size=VOCAB, experts=SHAPE) as client:
        made = await asyncio.gather(
            *(client.generate(ids, params, f"first-{i}", routed_from=0) for i, ids in enumerate(prompts))
        )
        await _check_continuation(client, prompts[0], made[0])
        await _check_abort_and_update(client, prompts[1], mixture)
    sequences = [[*ids, *each.output_ids] for ids, each in zip(prompts, made, strict=True)]
    forest = forest_from_sequences(sequences, [[False] * 8 + [True] * 64] * len(prompts))
    routing = unpack_routing(b"".join(each.routing + free_routing(1) for each in made), SHAPE)
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    RouterReplay.install(model, SHAPE)
    behavior = np.concatenate([each.logprobs for each in made])
    own, replayed = (
        _divergence(model, replace(forest, routing=routing), behavior)
        for routing in (None, ForestRouting(routing))
    )
    if kind == "sglang":
        assert own > 1e-4
        assert replayed <= own / 5
    else:
        assert max(own, replayed) < 1e-9


async def _check_continuation(client: EngineClient, prompt: list[int], first: Generation) -> None:
    """The next turn returns its own tokens only, and knows the experts of a prefix that is cached."""
    params = SamplingParams(max_new_tokens=4, extra={"ignore_eos": True})
    before = [*prompt, *first.output_ids]
    second = await client.generate([*before, 5, 6], params, "second", routed_from=len(before) - 1)
    assert second.cached_tokens >= len(before) - 1
    assert routed_tokens(second.routing) == 1 + 2 + 4 - 1
    whole = await client.generate([*before, 5, 6], params, "whole", routed_from=0)
    found = unpack_routing(whole.routing, SHAPE)
    assert (found[: len(before) - 1] == unpack_routing(first.routing, SHAPE)).all()
    assert (found[len(before) - 1 :][:3] == unpack_routing(second.routing, SHAPE)[:3]).all()


async def _check_abort_and_update(client: EngineClient, prompt: list[int], folder: str) -> None:
    """An aborted request returns the experts of its tokens, and one that is recomputed those of all."""
    params = SamplingParams(max_new_tokens=300, extra={"ignore_eos": True})
    tokens, some = 0, asyncio.Event()

    def progress(first: int, ids: Any) -> None:
        nonlocal tokens
        tokens = first + len(ids)
        some.set()

    running = asyncio.create_task(
        client.generate(prompt, params, "aborted", routed_from=0, progress=progress)
    )
    await some.wait()
    await client.abort("aborted")
    aborted = await running
    assert aborted.finish_reason == "abort"
    assert routed_tokens(aborted.routing) == len(prompt) + len(aborted.output_ids) - 1
    some.clear()
    running = asyncio.create_task(
        client.generate(prompt, params, "updated", routed_from=0, progress=progress)
    )
    await some.wait()
    await client.pause("retract")
    await client.update_weights(folder, 7)
    await client.resume()
    updated = await running
    assert updated.versions[-1].version == 7
    assert routed_tokens(updated.routing) == len(prompt) + 300 - 1


def _divergence(model: Any, forest: Any, behavior: np.ndarray) -> float:
    """KL(μ‖π), by the k3 estimate."""
    with torch.no_grad():
        ((logprobs, _),) = ParallelModel(model, trains=False).logprobs([forest], ForwardOptions())
    log_ratio = logprobs.numpy() - behavior
    return float(np.mean(np.expm1(log_ratio) - log_ratio))
