"""What every engine must do, over its real server: the local engine, SGLang and vLLM pass the same tests.

SGLang takes long to start: its server stands behind a real sglang-router, too.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_policy import (
    EOS,
    VOCAB,
    assert_close,
    assert_logprobs,
    plain_logprobs,
    prompt,
    sampled_logprobs,
    save_model,
)
from safetensors.torch import load_file
from tcp_server import TcpServer
from tiny_policy import TEMPLATE
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from waiting import until
from written_adapter import write_served

from agentrl.calls.prompts import Budget
from agentrl.chat.parsers.parser import THINK
from agentrl.columns.teacher import FolderTeacher, HttpTeacher
from agentrl.config.schema import AdapterConfig, AgentConfig, EngineConfig, ModelConfig
from agentrl.documents.model_call import SamplingMask, VersionSpan
from agentrl.documents.run import InferenceService, LiveWeights, PolicyVersion
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ServiceStatus
from agentrl.errors import ENGINES, ConfigError, EngineError, PublishError
from agentrl.gateway.answerer import CallShape, grammar_of
from agentrl.gateway.request import GatewayRequest
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import EngineInterruptedError, EngineRefusedError, Generation
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.engines.commands import (
    EngineCommand,
    EngineProcess,
    engine_command,
    engine_venv,
    free_port,
    has_gpu,
)
from agentrl.inference.http import EngineHttp
from agentrl.inference.served_engine import FrontRouter, LiveLoader
from agentrl.inference.session import EngineRouter
from agentrl.model.load import load_policy
from agentrl.model.lora import add_adapter
from agentrl.weights.folder import complete_folder, stored_dtype
from agentrl.weights.live import LiveHolder
from agentrl.weights.snapshot import write_alone

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.usefixtures("starts_warm")]

CONTEXT = 4096
ADAPTER = AdapterConfig(lora_rank=4)
LONG_TOKENS = 800
LONG = SamplingParams(max_new_tokens=LONG_TOKENS, extra={"ignore_eos": True})
SHORT = SamplingParams(max_new_tokens=12, extra={"ignore_eos": True})
GREEDY = SHORT.replace(max_new_tokens=24, temperature=0.0)
PARITY = 2e-2
PAUSED_HEALTH_SECONDS = "4"
"""SGLang answers for so long that it is not healthy while it is paused; 20 by default."""


@dataclass(frozen=True)
class Published:
    """A bfloat16 model that was trained in float32: what it was, what is published of it, and its weights."""

    base: str
    folder: str
    exact: str


@dataclass
class Served:
    """A running server, and the two folders of weights that the tests switch between.

    ``answers`` are those that it gave to ``greedy_answers`` before its weights were updated.
    """

    kind: str
    url: str
    process: EngineProcess
    first: str
    second: str
    answers: list[Generation]

    def client(self, timeout: float = 120.0) -> EngineClient:
        return engine_client(self.kind, self.url, timeout)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("engine-models")
    return save_model(base / "first", seed=1), save_model(base / "second", seed=2)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """What is published of a model after two steps."""
    folder = tmp_path_factory.mktemp("published")
    base = save_model(folder / "base", seed=3)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    (folder / "base" / "chat_template.jinja").write_text(TEMPLATE)
    policy = load_policy(ModelConfig(model_name_or_path=base, dtype="float32"))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    for seed in (1, 2):
        ids = torch.tensor([prompt(seed)])
        policy.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    policy.model.save_pretrained(folder / "exact")
    (folder / "weights").mkdir()
    write_alone(policy.published, folder / "weights")
    complete_folder(Path(base), folder / "weights")
    return Published(base, str(folder / "weights"), str(folder / "exact"))


KINDS = ["local", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("sglang", "vllm"))]


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest,
    starts_warm: None,
    folders: tuple[str, str],
    published: Published,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    kind = str(request.param)
    first, second = folders
    if kind != "local" and not has_gpu():  # they compute bfloat16 weights in float32, exactly
        first = published.folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", PAUSED_HEALTH_SECONDS)
        try:
            url, process = start(kind, first, tmp_path_factory.mktemp(kind), ADAPTER)
        except ConfigError as error:
            if kind in os.environ.get("AGENTRL_REQUIRE_ENGINES", "").split(","):
                raise
            pytest.skip(str(error))

    async def ready() -> list[Generation]:
        async with engine_client(kind, url) as client:
            await process.wait_ready(client, 200.0)
            await client.set_version(0)
            return await greedy_answers(client, "started")

    yield Served(kind, url, process, first, second, asyncio.run(ready()))
    asyncio.run(process.stop())


def start(
    kind: str, folder: str, logs: Path, adapter: AdapterConfig | None = None
) -> tuple[str, EngineProcess]:
    """Start a server that serves ``folder``; return its URL before it is ready."""
    config = EngineConfig(engine=kind, max_total_tokens=32768, inf_mem_ratio=0.1)  # type: ignore[arg-type]
    port = free_port(config.host)
    command = engine_command(folder, ModelConfig(), config, port, adapter)
    return f"http://{config.host}:{port}", EngineProcess(command, logs / f"{kind}.log")


async def greedy_answers(client: EngineClient, name: str) -> list[Generation]:
    return [await client.generate(prompt(seed), GREEDY, f"{name}-{seed}") for seed in (3, 4, 5)]


@pytest.fixture
async def engine(served: Served) -> AsyncIterator[EngineClient]:
    """A client of the server; afterwards the server is idle again and serves the first weights."""
    async with served.client() as client:
        yield client
        if served.process.returncode is None:
            await client.abort(None)
            await client.resume()
            await until(lambda: idle(client))
            if (await client.model_info()).version != 0:
                await client.update_weights(served.first, 0)
            await client.flush_cache()


async def idle(client: EngineClient) -> bool:
    return (await client.load()).requests == 0


async def busy(client: EngineClient) -> bool:
    return (await client.load()).requests > 0


async def running_long(client: EngineClient, seed: int, rid: str) -> "asyncio.Task[Generation]":
    """A long generation that has surely made some tokens: two shorter ones that came after it have ended.

    On a busy machine the long one may end first; then another takes its place.
    """
    for attempt in range(5):
        task = asyncio.create_task(client.generate(prompt(seed), LONG, rid))
        for beside in ("one", "two"):
            await client.generate(prompt(seed), SHORT, f"beside-{beside}-{rid}-{attempt}")
        if not task.done():
            return task
        assert len(task.result().output_ids) == LONG_TOKENS
    raise AssertionError("a long generation ended before two short ones, five times")


async def test_an_engine_started_on_a_version_equals_one_updated_to_it(
    served: Served, engine: EngineClient, published: Published, tmp_path: Path
) -> None:
    """It is updated from the version to the base and back: one server is both."""
    async with AsyncExitStack() as stack:
        started = served.answers
        if served.first != published.folder:  # a server that computes in bfloat16
            url, process = start(served.kind, published.folder, tmp_path)
            stack.push_async_callback(process.stop)
            engine = await stack.enter_async_context(engine_client(served.kind, url))
            await process.wait_ready(engine, 200.0)
            await engine.set_version(0)
            started = await greedy_answers(engine, "started")
        await engine.update_weights(published.base, 1)
        before = await greedy_answers(engine, "base")
        await engine.update_weights(published.folder, 2)
        after = await greedy_answers(engine, "updated")
    assert [item.logprobs for item in after] != [item.logprobs for item in before]
    assert [item.output_ids for item in started] == [item.output_ids for item in after]
    assert [item.logprobs for item in started] == [item.logprobs for item in after]
    for seed, made in zip((3, 4, 5), started, strict=True):
        assert made.finish_reason == "length"
        ours = plain_logprobs(published.exact, prompt(seed), made.output_ids)
        gap = ours.gather(-1, torch.tensor(made.output_ids)[:, None])[:, 0] - torch.tensor(made.logprobs)
        assert gap.abs().mean() < PARITY


def test_what_is_published_is_rounded_once(published: Published) -> None:
    rounded, exact = (
        load_file(Path(folder) / "model.safetensors") for folder in (published.folder, published.exact)
    )
    assert stored_dtype(Path(published.base)) == "bfloat16"
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)
    assert any(not torch.equal(rounded[name].float(), exact[name]) for name in exact)


async def test_an_adapter_is_loaded_while_requests_run(
    served: Served, engine: EngineClient, tmp_path: Path
) -> None:
    if served.kind == "vllm" and not has_gpu():
        pytest.skip("vLLM's adapters need a GPU")
    policies = {name: save_adapter(served.first, tmp_path / name, seed) for seed, name in enumerate("ab")}
    long = await running_long(engine, 71, "plain")
    await engine.load_adapter("run@7", str(tmp_path / "a"))
    assert "run@7" in await engine.load_adapter("other@7", str(tmp_path / "b"))
    made = {}
    for name, key in (("run@7", "a"), ("other@7", "b"), (None, "")):
        engine.adapter = name
        made[key] = await engine.generate(prompt(72), SHORT, f"adapted-{key}")
    assert made["a"].versions == made["b"].versions == (VersionSpan(version=7, start=0, end=12),)
    for key, policy in policies.items():
        ids = torch.tensor([[*prompt(72), *made[key].output_ids]])
        with torch.no_grad():
            expected = policy(ids).logits[0, 39:-1].log_softmax(-1)
        assert_close(expected, made[key])
    assert_logprobs(served.first, prompt(72), made[""])
    assert made[""].versions == (VersionSpan(version=0, start=0, end=12),)
    engine.adapter = "run@7"  # loaded again under its name, it is replaced
    await engine.load_adapter("run@7", str(tmp_path / "b"))
    again = await engine.generate(prompt(72), SHORT, "replaced")
    ids = torch.tensor([[*prompt(72), *again.output_ids]])
    with torch.no_grad():
        assert_close(policies["b"](ids).logits[0, 39:-1].log_softmax(-1), again)
    engine.adapter = "never@1"
    with pytest.raises(EngineError, match="never@1") as raised:
        await engine.generate(prompt(72), SHORT, "unknown")
    assert not isinstance(raised.value, EngineRefusedError)
    for name in ("run@7", "other@7"):
        await engine.unload_adapter(name)
    await engine.abort("plain")
    assert_logprobs(served.first, prompt(71), await long, end=20)


def save_adapter(base: str, folder: Path, seed: int) -> torch.nn.Module:
    """Write a random adapter of the model in ``base``; return the adapted model."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapter = add_adapter(model, ADAPTER, Path(base), None)
    torch.manual_seed(seed)
    for name, value in adapter.named_parameters():
        if ".lora_B." in name:
            value.data.normal_(std=0.05)
    folder.mkdir()
    write_served(adapter, folder)
    return model


async def test_health_and_model_info(served: Served, engine: EngineClient) -> None:
    assert await engine.health()
    info = await engine.model_info()
    assert (info.model_path, info.version, info.vocab_size) == (served.first, 0, VOCAB)
    assert (await engine.server_info())["model_path"] == served.first


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
async def test_logprobs_are_those_of_the_plain_model(
    served: Served, engine: EngineClient, temperature: float
) -> None:
    params = SHORT.replace(max_new_tokens=60, temperature=temperature)
    made = await engine.generate(prompt(1), params, f"logprobs-{temperature}")
    assert len(made.output_ids) == len(made.logprobs) == 60
    assert (made.finish_reason, made.prompt_tokens, made.logprobs_of) == ("length", 40, "policy")
    assert made.versions == (VersionSpan(version=0, start=0, end=60),)
    assert_logprobs(served.first, prompt(1), made, temperature=temperature)


WARM = SHORT.replace(max_new_tokens=24, temperature=1.5)
BIASED = WARM.replace(extra={**WARM.extra, "logit_bias": {"7": 4.0, "300": -4.0}})
SHAPED = {
    "top_p": (WARM.replace(top_p=0.7), "truncated"),
    "top_k": (WARM.replace(top_k=5), "truncated"),
    "min_p": (WARM.replace(min_p=0.2), "truncated"),
    "penalties": (WARM.replace(presence_penalty=1.5, frequency_penalty=0.4), "sampled"),
    "repetition": (WARM.replace(repetition_penalty=1.4), "sampled"),
    "bias": (BIASED, "sampled"),
    "penalty-top_k": (WARM.replace(presence_penalty=1.5, top_k=5), "truncated"),
    "top-1": (WARM.replace(top_k=1), "truncated"),
}
"""Calls that sample from something else than the policy, and what their logprobs are of: vLLM has no mask."""


async def test_logprobs_of_a_shaped_call_are_what_it_says(served: Served, engine: EngineClient) -> None:
    for name, (params, expected) in SHAPED.items():
        if name == "bias" and served.kind == "local":
            with pytest.raises(EngineRefusedError, match="does not support sampling parameter 'logit_bias'"):
                await engine.generate(prompt(2), params, "biased")
            continue
        made = await engine.generate(prompt(2), params, f"shaped-{name}")
        assert made.logprobs_of == ("sampled" if served.kind == "vllm" else expected), name
        drawn_from = sampled_logprobs(served.kind, served.first, prompt(2), made, params)
        assert drawn_from.gather(-1, torch.tensor(made.output_ids)[:, None]).isfinite().all(), name
        assert_close(drawn_from, made)
        mask = SamplingMask.unpack(made.sampling_mask, len(made.output_ids))
        assert bool(mask.ids.size) == (made.logprobs_of == "truncated")
        if mask.ids.size:
            assert mask.ids.tolist() == drawn_from.isfinite().nonzero()[:, 1].tolist(), name
            assert mask.counts.tolist() == drawn_from.isfinite().sum(1).tolist(), name


async def test_a_demanded_call_is_sampled_by_the_grammar(served: Served, engine: EngineClient) -> None:
    """The model chooses one of the demanded calls; the logprobs are those of the grammar."""
    shape = CallShape('<call>{"name": "', '", "arguments": ', "}</call>", THINK, "\n")
    schema = {
        "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
        "additionalProperties": False,
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in "xyz"]
    request = GatewayRequest(model="policy", messages=[], tools=tools, must_call=("x", "y"))
    grammar = grammar_of(request, replace(shape, tags=None), in_thought=False)
    assert grammar is not None
    params = SamplingParams(max_new_tokens=500, stop_token_ids=(EOS,), extra=grammar)
    if served.kind == "local":
        with pytest.raises(EngineRefusedError, match="does not support sampling parameter 'structural_tag'"):
            await engine.generate(prompt(11), params, "demanded")
        return
    tokenizer = Tokenizer.from_file(str(Path(served.first) / "tokenizer.json"))
    generation = await engine.generate(prompt(11), params, "demanded")
    text = tokenizer.decode(list(generation.output_ids))
    assert re.fullmatch(
        r'<call>\{"name": "[xy]", "arguments": \{\s*"a"\s*:\s*(true|false)\s*\}\}</call>', text
    )
    assert generation.finish_reason == "stop"
    assert generation.logprobs_of == "sampled"
    assert generation.logprobs[0] == pytest.approx(0.0, abs=1e-3)  # only "<" may come first
    thinking = grammar_of(request, shape, in_thought=True)
    assert thinking is not None
    opened = await engine.generate(prompt(11), params.replace(max_new_tokens=8, extra=thinking), "opened")
    assert opened.finish_reason == "length"  # a random thought goes on


async def test_greedy_ids_are_those_of_the_plain_model(served: Served, engine: EngineClient) -> None:
    made = await engine.generate(prompt(3), SHORT.replace(temperature=0.0, max_new_tokens=40), "greedy")
    expected = plain_logprobs(served.first, prompt(3), made.output_ids)
    assert expected.argmax(-1).tolist() == list(made.output_ids)
    assert made.logprobs_of == "policy"
    assert_close(expected, made)


async def test_a_stop_token_ends_the_generation_and_is_part_of_it(engine: EngineClient) -> None:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=40)
    whole = await engine.generate(prompt(3), greedy, "unstopped")
    stop = whole.output_ids[10]
    first = whole.output_ids.index(stop)
    made = await engine.generate(prompt(3), greedy.replace(stop_token_ids=(stop,)), "stopped")
    assert (made.finish_reason, made.output_ids) == ("stop", whole.output_ids[: first + 1])
    deaf = greedy.replace(stop_token_ids=(stop,), extra={"ignore_eos": True})
    made = await engine.generate(prompt(3), deaf, "deaf")
    assert (made.finish_reason, len(made.output_ids)) == ("length", 40)


async def test_sixteen_at_once_get_what_each_would_get_alone(served: Served, engine: EngineClient) -> None:
    prompts = [prompt(50)[:20] + prompt(seed, 5 + seed) for seed in range(16)]
    greedy = SHORT.replace(temperature=0.0, max_new_tokens=24)
    made = await asyncio.gather(
        *(engine.generate(ids, greedy, f"concurrent-{n:02d}") for n, ids in enumerate(prompts))
    )
    for ids, generation in zip(prompts, made, strict=True):
        assert_logprobs(served.first, ids, generation)
        expected = plain_logprobs(served.first, ids, generation.output_ids)
        assert expected.argmax(-1).tolist() == list(generation.output_ids)


async def test_a_prefix_that_was_seen_is_not_computed_again(served: Served, engine: EngineClient) -> None:
    first = await engine.generate(prompt(4, 220), SHORT, "turn-1")
    following = [*prompt(4, 220), *first.output_ids, *prompt(5, 10)]
    second = await engine.generate(following, SHORT, "turn-2")
    assert second.cached_tokens >= 200
    assert_logprobs(served.first, following, second)
    await engine.flush_cache()
    assert (await engine.generate(following, SHORT, "turn-3")).cached_tokens == 0


async def test_abort_returns_what_was_made(engine: EngineClient) -> None:
    one = await running_long(engine, 6, "abort-one")
    other = asyncio.create_task(engine.generate(prompt(7), SHORT.replace(max_new_tokens=300), "keep-me"))
    await engine.abort("abort-one")
    made = await one
    assert made.finish_reason == "abort"
    assert 0 < len(made.output_ids) < LONG_TOKENS
    assert made.versions[-1].end == len(made.output_ids) == len(made.logprobs)
    assert (await other).finish_reason == "length"


async def test_abort_all(engine: EngineClient) -> None:
    tasks = await asyncio.gather(*(running_long(engine, seed, f"all-{seed}") for seed in (8, 9)))
    running = [task for task in tasks if not task.done()]
    await engine.abort(None)
    assert [made.finish_reason for made in await asyncio.gather(*running)] == ["abort"] * len(running)
    assert running
    await until(lambda: idle(engine))


async def test_cancelling_a_call_ends_its_request(engine: EngineClient) -> None:
    task = await running_long(engine, 10, "cancelled")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: idle(engine))


async def test_a_request_sent_while_paused_waits(engine: EngineClient) -> None:
    await engine.pause("retract")
    assert not await engine.health()
    task = asyncio.create_task(engine.generate(prompt(11), SHORT, "waiting"))
    await asyncio.wait({task}, timeout=1.0)
    assert not task.done()
    await engine.resume()
    assert len((await task).output_ids) == 12
    assert await engine.health()


async def test_pause_in_mode_abort_ends_what_runs(engine: EngineClient) -> None:
    task = await running_long(engine, 12, "paused-away")
    await engine.pause("abort")
    made = await task
    assert made.finish_reason == "abort"
    assert made.output_ids


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_pause_and_resume_change_nothing(served: Served, engine: EngineClient, mode: str) -> None:
    task = await running_long(engine, 13, f"pause-{mode}")
    await engine.pause(mode)  # type: ignore[arg-type]
    await engine.resume()
    made = await task
    assert (len(made.output_ids), made.finish_reason) == (LONG_TOKENS, "length")
    assert_logprobs(served.first, prompt(13), made)


async def test_an_engine_gives_its_memory_back_and_goes_on(served: Served, engine: EngineClient) -> None:
    if served.kind == "vllm":
        pytest.skip("vLLM gives memory back on GPUs only")
    greedy = SHORT.replace(temperature=0.0)
    before = await engine.generate(prompt(3), greedy, "before")
    await engine.pause("abort")
    await engine.release_memory()
    late = asyncio.create_task(engine.generate(prompt(3), greedy, "late"))
    await engine.resume_memory("weights")
    await engine.update_weights(served.first, 0)
    await engine.resume_memory("kv_cache")
    assert not late.done()
    await engine.resume()
    assert (await late).output_ids == before.output_ids


async def test_new_weights_answer_under_their_version(served: Served, engine: EngineClient) -> None:
    await engine.update_weights(served.second, 5)
    assert (await engine.model_info()).version == 5
    made = await engine.generate(prompt(14), SHORT, "updated")
    assert made.versions == (VersionSpan(version=5, start=0, end=12),)
    assert_logprobs(served.second, prompt(14), made)
    await engine.check_instance(served.process.instance)
    with pytest.raises(EngineError, match="answered by another server"):
        await engine.check_instance("another")


async def test_a_request_in_flight_carries_both_versions(served: Served, engine: EngineClient) -> None:
    task = await running_long(engine, 15, "in-flight")
    await engine.pause("retract")
    await engine.update_weights(served.second, 6)
    await engine.resume()
    made = await task
    assert [span.version for span in made.versions] == [0, 6]
    switch = made.versions[0].end
    assert made.versions == (
        VersionSpan(version=0, start=0, end=switch),
        VersionSpan(version=6, start=switch, end=LONG_TOKENS),
    )
    assert_logprobs(served.first, prompt(15), made, end=switch)
    assert_logprobs(served.second, prompt(15), made, start=switch)


async def test_weights_from_the_trainers_memory_answer_under_their_version(
    served: Served, engine: EngineClient
) -> None:
    if served.kind == "vllm":
        pytest.skip("vLLM takes versions from a disk")
    tensors = load_file(Path(served.second) / "model.safetensors")
    half = {name: tensors.pop(name) for name in sorted(tensors)[::2]}
    cpu = torch.device("cpu")
    shared, sent = (LiveHolder(kind, cpu) for kind in ("tensor", "distributed"))
    loader = LiveLoader(engine)
    try:
        for number, holder in ((8, shared), (9, sent), (10, shared), (11, sent)):
            await engine.update_weights(served.first, 0)
            live = holder.join([holder.hold(tensors), holder.hold(half)])
            await engine.pause("retract")
            await loader.load(live_version(number, live))
            await engine.resume()
            made = await engine.generate(prompt(14), SHORT, f"live-{number}")
            assert made.versions == (VersionSpan(version=number, start=0, end=12),)
            assert_logprobs(served.second, prompt(14), made)
        forgotten = sent.join([sent.hold(tensors)])
        for _ in range(2):
            sent.hold(half)
        await engine.pause("retract")
        with pytest.raises(PublishError, match="not held any more"):
            await loader.load(live_version(12, forgotten))
        await engine.resume()
        assert_logprobs(served.second, prompt(14), await engine.generate(prompt(14), SHORT, "live-11"))
    finally:
        shared.close()
        sent.close()


def live_version(number: int, live: LiveWeights) -> PolicyVersion:
    return PolicyVersion(id=number, step=number, location="", files=(), train_step=None, live=live)


async def test_weights_that_cannot_be_loaded_leave_the_old_ones(
    served: Served, engine: EngineClient, tmp_path: Path
) -> None:
    before = await engine.generate(prompt(16), SHORT.replace(temperature=0.0), "before")
    await engine.pause("retract")
    with pytest.raises(EngineRefusedError):
        await engine.update_weights(str(tmp_path / "nothing-here"), 9)
    await engine.resume()
    assert (await engine.model_info()).version == 0
    after = await engine.generate(prompt(16), SHORT.replace(temperature=0.0), "after")
    assert (after.output_ids, after.versions) == (before.output_ids, before.versions)


async def test_ids_outside_the_vocabulary_and_a_prompt_longer_than_the_context_are_refused(
    engine: EngineClient,
) -> None:
    for ids in ([], [5, VOCAB], [-1, 5]):
        with pytest.raises(EngineRefusedError):
            await engine.generate(ids, SHORT, "outside")
    with pytest.raises(EngineRefusedError, match="400"):
        await engine.generate(prompt(17, CONTEXT + 4), SHORT, "too-long")
    assert await engine.health()


async def test_whatever_fits_the_reported_context_is_never_refused(engine: EngineClient) -> None:
    length = (await engine.model_info()).context_length
    assert length is not None
    assert CONTEXT - 8 <= length <= CONTEXT
    budget = Budget(AgentConfig(), length)
    for tokens in (length - 1, length - 20):
        params = budget.clamp(SHORT.replace(max_new_tokens=32768, extra={}), tokens)
        made = await engine.generate(prompt(17, tokens), params, f"fits-{tokens}")
        assert len(made.output_ids) <= length - tokens
        assert made.finish_reason in ("stop", "length")


async def test_ten_turns_recompute_at_most_a_tenth_of_what_the_engine_has_seen(
    served: Served, engine: EngineClient
) -> None:
    """The second half shares a group's prompt with the first, as trajectories of one task do."""
    recomputed = prompts = 0
    async with routed(served) as router:
        for trajectory in range(2):
            async with router.session(f"t{trajectory}", "group") as session:
                ids, known = prompt(30, 160), 0 if trajectory == 0 else 160
                for turn in range(10):
                    made = await session.generate(ids, SHORT)
                    prompts += len(ids)
                    recomputed += max(0, known - made.cached_tokens)
                    ids = [*ids, *made.output_ids]
                    known = len(ids)
                    ids = [*ids, *prompt(100 * trajectory + turn, 60)]
    assert recomputed <= prompts / 10


async def test_the_router_survives_an_abort(served: Served, engine: EngineClient) -> None:
    async with routed(served) as router, router.session("trajectory") as session:
        task = asyncio.create_task(session.generate(prompt(18), LONG))
        await until(lambda: busy(engine))
        await engine.generate(prompt(18), SHORT, "beside-router")
        await engine.abort(None)
        made = await task
    assert (len(made.output_ids), made.finish_reason) == (LONG_TOKENS, "length")
    assert_logprobs(served.first, prompt(18), made)


async def test_a_cut_connection_loses_no_token_that_was_sent(served: Served, engine: EngineClient) -> None:
    whole = LONG.replace(max_new_tokens=2500)  # more than is sent
    async with CutAfter(served.url, 60_000).serving() as cut, served.client() as direct:
        through = engine_client(served.kind, cut.url, 30.0)
        with pytest.raises(EngineInterruptedError) as raised:
            await through.generate(prompt(21), whole, "cut")
        await through.close()
        part = raised.value.partial
        assert part is not None
        assert 10 < len(part.output_ids) == len(part.logprobs) < whole.max_new_tokens
        assert part.versions == (VersionSpan(version=0, start=0, end=len(part.output_ids)),)
        assert_logprobs(served.first, prompt(21), part)
        rest = await direct.generate([*prompt(21), *part.output_ids], SHORT, "rest")
    assert_logprobs(served.first, [*prompt(21), *part.output_ids], rest)
    await until(lambda: idle(engine))


async def test_a_server_as_a_teacher_scores_as_its_folder_does(served: Served) -> None:
    if served.kind == "local":
        pytest.skip("teachers are served by SGLang and vLLM")
    nobody, teacher = (
        HttpTeacher(f"http://127.0.0.1:{free_port('127.0.0.1')}", 60.0),
        HttpTeacher(served.url, 60.0),
    )
    with pytest.raises(EngineError) as down:
        await nobody.folder()
    assert down.value.outage is not None
    assert await teacher.folder() == served.first
    for top in (0, 3):
        found, wanted = await asyncio.gather(
            teacher.score(prompt(22), 3, top), FolderTeacher(Path(served.first)).score(prompt(22), 3, top)
        )
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-2)
        ids = [None if each.top is None else each.top.ids.ids.tolist() for each in (found, wanted)]
        assert ids[0] == ids[1]
        assert (ids[0] is None) is (top == 0)
    await nobody.close()
    await teacher.close()


@pytest.fixture(scope="module")
def router_python() -> str:
    python = engine_venv("sglang") / "bin" / "python"
    probe = [str(python), "-c", "import sglang_router"]
    if not python.is_file() or subprocess.run(probe, capture_output=True, check=False).returncode:
        if "sglang" in os.environ.get("AGENTRL_REQUIRE_ENGINES", "").split(","):
            raise FileNotFoundError(f"{python} has no sglang_router; run: bash scripts/setup_sglang.sh")
        pytest.skip(f"{python} has no sglang_router; run: bash scripts/setup_sglang.sh")
    return str(python)


async def test_trajectories_run_through_a_router(
    served: Served, engine: EngineClient, router_python: str, tmp_path: Path
) -> None:
    """They keep their engine, resume aborted calls, and lose no token when SGLang dies."""
    if served.kind != "sglang":
        pytest.skip("sglang-router comes with SGLang")
    await engine.update_weights(served.second, 1)
    async with AsyncExitStack() as stack:
        url, local = start("local", served.second, tmp_path)
        stack.push_async_callback(local.stop)
        beside = await stack.enter_async_context(engine_client("local", url))
        await local.wait_ready(beside, 150.0)
        await beside.set_version(1)
        address = await stack.enter_async_context(sglang_router(router_python, tmp_path, served.url, url))
        router = EngineRouter(no_engines, router_url=address, vocab_size=VOCAB, backoff=0.05)
        stack.push_async_callback(router.close)
        counts = await asyncio.gather(*(five_turns(router, served.second, number) for number in range(2)))
        assert sum(cached for cached, _ in counts) >= 0.9 * sum(known for _, known in counts)
        running = [asyncio.create_task(long_turn(router, served.second, number)) for number in range(4)]
        for client in (beside, engine):
            await until(partial(busy, client))
        direct = await running_long(engine, 19, "orphan")
        assert not any(task.done() for task in running)
        await dies(served, served.second, direct)
        await asyncio.gather(*running)


@asynccontextmanager
async def sglang_router(python: str, logs: Path, *engines: str) -> AsyncIterator[str]:
    """A router at which the engines are registered while it runs; yields its URL."""
    host = "127.0.0.1"
    port, metrics = free_port(host), free_port(host)
    argv = [
        *(python, "-m", "sglang_router.launch_router", "--host", host, "--port", str(port)),
        *("--prometheus-port", str(metrics), "--policy", "cache_aware", "--disable-retries"),
    ]
    process, url = EngineProcess(EngineCommand(argv), logs / "router.log"), f"http://{host}:{port}"
    try:
        async with EngineClient(url) as client:
            await process.wait_ready(client, 150.0)
        fronts = [(FrontRouter(url), engine) for engine in engines]
        keeping = [asyncio.create_task(front.keep(engine)) for front, engine in fronts]
        await workers(url, len(engines))
        yield url
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        for front, engine in fronts:
            await front.leave(engine)
        await workers(url, 0)
    finally:
        await process.stop()


async def workers(router: str, count: int) -> None:
    """Wait until the router has ``count`` workers, all healthy."""
    http = EngineHttp(router)

    async def listed() -> bool:
        found: list[dict[str, Any]] = (await http.call("GET", "/workers"))["workers"]
        return [worker["is_healthy"] for worker in found] == [True] * count

    await until(listed, 60)
    await http.close()


async def no_engines() -> list[InferenceService]:
    return []


async def five_turns(router: EngineRouter, folder: str, number: int) -> tuple[int, int]:
    """Return the tokens that the engine had cached, and those that it had seen."""
    cached = known = 0
    async with router.session(f"t{number}", f"group{number}") as session:
        ids = prompt(number, 200)
        for turn in range(5):
            made = await session.generate(ids, SHORT)
            assert_logprobs(folder, ids, made)
            cached, known = cached + made.cached_tokens, known + (len(ids) - 40 if turn else 0)
            ids = [*ids, *made.output_ids, *prompt(50 + turn, 28)]
    return cached, known


async def long_turn(router: EngineRouter, folder: str, number: int) -> None:
    """A long generation that loses none of its tokens."""
    async with router.session(f"long{number}") as session:
        made = await session.generate(prompt(60 + number), LONG)
    assert (len(made.output_ids), made.finish_reason) == (LONG_TOKENS, "length")
    assert_logprobs(folder, prompt(60 + number), made)


async def test_an_engine_that_dies_is_an_outage_with_the_tokens_that_it_sent(served: Served) -> None:
    """The last test: it kills the server."""
    if served.process.returncode is not None:
        pytest.skip("it has died so behind the router")
    async with served.client() as client:
        await dies(served, served.first, await running_long(client, 19, "orphan"))


async def dies(served: Served, weights: str, running: "asyncio.Task[Generation]") -> None:
    """Kill the server: what is ``running`` by its ``weights`` ends in an outage with the tokens it sent."""
    os.killpg(served.process.pid, signal.SIGKILL)
    async with served.client() as client, asyncio.timeout(20):
        with pytest.raises(EngineInterruptedError, match=served.url) as raised:
            await running
        with pytest.raises(EngineError, match="cannot be reached"):
            await client.generate(prompt(20), SHORT, "nobody")
        assert not await client.health()
    part = raised.value.partial
    assert raised.value.outage == ENGINES
    assert part is not None
    assert_logprobs(weights, prompt(19), part)


@asynccontextmanager
async def routed(served: Served) -> AsyncIterator[EngineRouter]:
    service = InferenceService(
        id="one", url=served.url, engine=served.kind, model="m", status=ServiceStatus.READY, host="h", pid=1
    )

    async def live() -> list[InferenceService]:
        return [service]

    router = EngineRouter(live, backoff=0.01)
    yield router
    await router.close()


class CutAfter(TcpServer):
    """A TCP proxy that resets each connection after ``limit`` bytes of an answer to a generation."""

    def __init__(self, target: str, limit: int) -> None:
        super().__init__()
        self._port = int(target.rpartition(":")[2])
        self._limit = limit

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        copying = asyncio.create_task(self._copy(reader, back, None))
        try:
            with contextlib.suppress(ConnectionError):
                await self._copy(there, writer, self._limit)
        finally:
            copying.cancel()
            writer.transport.abort()
            back.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, limit: int | None) -> None:
        passed = 0
        while (data := await source.read(1024)) and (limit is None or passed < limit):
            passed += len(data)
            to.write(data)
            await to.drain()
