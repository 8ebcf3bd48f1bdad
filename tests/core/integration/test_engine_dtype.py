"""A bfloat16 model that is trained in float32: engines started on a version and updated to it are equal."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from engine_policy import plain_logprobs, prompt
from safetensors.torch import load_file
from tiny_policy import write_tiny_policy
from transformers import AutoModelForCausalLM

from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ConfigError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import Generation
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.engines.commands import EngineProcess, engine_command, free_port
from agentrl.model.load import load_policy
from agentrl.weights.folder import complete_folder, stored_dtype
from agentrl.weights.snapshot import write_alone

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

KINDS = ["local", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("sglang", "vllm"))]
PARITY = 2e-2
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, extra={"ignore_eos": True})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights and configuration are bfloat16."""
    folder = write_tiny_policy(tmp_path_factory.mktemp("base"), hidden_size=256)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What is published of the model after two steps, and its float32 weights."""
    policy = load_policy(ModelConfig(model_name_or_path=str(base), dtype="float32"))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    for seed in (1, 2):
        ids = torch.tensor([prompt(seed)]) % 250
        policy.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    exact = tmp_path_factory.mktemp("exact")
    policy.model.save_pretrained(exact)
    published = tmp_path_factory.mktemp("weights")
    write_alone(policy.published, published)
    complete_folder(base, published)
    return published, exact


async def start(kind: str, folder: Path, log: Path, stack: AsyncExitStack) -> EngineClient:
    """A client of a server that serves ``folder``; both end with ``stack``."""
    config = EngineConfig(engine=kind, max_total_tokens=8192, inf_mem_ratio=0.1)  # type: ignore[arg-type]
    port = free_port(config.host)
    process = EngineProcess(engine_command(str(folder), ModelConfig(), config, port), log)
    stack.push_async_callback(process.stop)
    client = await stack.enter_async_context(engine_client(kind, f"http://{config.host}:{port}"))
    await process.wait_ready(client, 200.0)
    await client.set_version(0)
    return client


async def answers(client: EngineClient, name: str) -> list[Generation]:
    made = [
        await client.generate([token % 250 for token in prompt(seed)], GREEDY, f"{name}-{seed}")
        for seed in (3, 4, 5)
    ]
    assert [item.finish_reason for item in made] == ["length"] * 3
    return made


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_started_on_a_version_equals_one_updated_to_it(
    kind: str, base: Path, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    """It is updated from the version to the base and back: one server is both."""
    published, exact = trained
    async with AsyncExitStack() as stack:
        try:
            engine = await start(kind, published, tmp_path / "engine.log", stack)
        except ConfigError as error:
            if kind in os.environ.get("AGENTRL_REQUIRE_ENGINES", "").split(","):
                raise
            pytest.skip(str(error))
        found = await answers(engine, "started")
        await engine.update_weights(str(base), 1)
        before = await answers(engine, "base")
        await engine.update_weights(str(published), 2)
        after = await answers(engine, "updated")
    assert [item.logprobs for item in after] != [item.logprobs for item in before]
    assert [item.output_ids for item in found] == [item.output_ids for item in after]
    assert [item.logprobs for item in found] == [item.logprobs for item in after]
    for seed, made in zip((3, 4, 5), found, strict=True):
        ids = [token % 250 for token in prompt(seed)]
        ours = await asyncio.to_thread(plain_logprobs, str(exact), ids, made.output_ids)
        gap = ours.gather(-1, torch.tensor(made.output_ids)[:, None])[:, 0] - torch.tensor(made.logprobs)
        assert gap.abs().mean() < PARITY


def test_what_is_published_is_rounded_once(trained: tuple[Path, Path]) -> None:
    published, exact = (load_file(folder / "model.safetensors") for folder in trained)
    assert stored_dtype(trained[0]) == "bfloat16"
    assert all(torch.equal(published[name], exact[name].bfloat16()) for name in exact)
    assert any(not torch.equal(published[name].float(), exact[name]) for name in exact)
