"""The local engine serves a trained reward model, and the scorer ``reward_model`` asks it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest
import torch
import yaml
from tiny_policy import tiny_format, write_tiny_policy
from transformers import AutoModelForSequenceClassification

from agentrl.config.schema import ModelConfig
from agentrl.local.engine.rewards import RewardServer
from agentrl.model.reward_head import load_reward_model
from agentrl.scoring.reward_model import render_trajectory

SAID = [
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": text}] for text in ["4", "five"]
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = write_tiny_policy(tmp_path_factory.mktemp("model"))
    load_reward_model(base, ModelConfig(), torch.float32).save_pretrained(base)
    return base


def server_of(folder: Path, max_tokens: int = 4096) -> RewardServer:
    return RewardServer(
        str(folder), dtype=None, device=torch.device("cpu"), max_requests=8, max_tokens=max_tokens
    )


async def test_each_request_gets_the_reward_of_its_ids(folder: Path) -> None:
    ids = [render_trajectory(tiny_format(), messages) for messages in SAID]
    asked = [ids[1], ids[0], ids[1][:9], ids[0], ids[1][:7]]
    model = AutoModelForSequenceClassification.from_pretrained(folder).requires_grad_(requires_grad=False)
    expected = [float(model(input_ids=torch.tensor([each])).logits[0, 0]) for each in asked]
    server = server_of(folder)
    assert server.rewards(asked) == pytest.approx(expected, abs=1e-5)
    app = server.app()
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://t") as client,
    ):
        replies = await asyncio.gather(
            *(client.post("/classify", json={"input_ids": each}) for each in asked)
        )
        found = [reply.json()["embedding"] for reply in replies]
        assert [value for (value,) in found] == pytest.approx(expected, abs=1e-5)
        assert replies[0].json()["meta_info"]["prompt_tokens"] == len(ids[1])
        assert (await client.get("/model_info")).json()["is_generation"] is False
        for wrong in ([], [1], [1, 10**6], ["a", 1], [1] * 5000):
            reply = await client.post("/classify", json={"input_ids": wrong})
            assert reply.status_code == 400, wrong
            assert "input_ids" in reply.json()["error"]["message"]


async def test_a_forward_pass_takes_what_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of(folder, max_tokens=20)
    sizes: list[int] = []
    compute = server.rewards

    def counted(batch: Sequence[Sequence[int]]) -> list[float]:
        sizes.append(len(batch))
        return compute(batch)

    monkeypatch.setattr(server, "rewards", counted)
    app = server.app()
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://t") as client,
    ):
        ids = [[1, 2, 3, number, 5, 6, 7, 8] for number in range(5)]
        replies = await asyncio.gather(*(client.post("/classify", json={"input_ids": each}) for each in ids))
    assert all(reply.status_code == 200 for reply in replies)
    assert max(sizes) <= 2
    assert sum(sizes) == 5


async def test_a_reward_that_is_no_number_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_of(folder)
    monkeypatch.setattr(server, "rewards", lambda batch: [float("nan")] * len(batch))
    app = server.app()
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://t") as client,
    ):
        reply = await client.post("/classify", json={"input_ids": [1, 2, 3]})
    assert reply.status_code == 400
    assert "reward for these 3 tokens is nan" in reply.text


def test_the_example_of_the_agent_config_names_its_settings() -> None:
    text = Path("assets/agent_config_example.yml").read_text(encoding="utf-8")
    begin = text.index("# reward_model:")
    lines = text[begin : text.index("\n\n", begin)].splitlines()
    section = yaml.safe_load("\n".join(line.removeprefix("# ") for line in lines))["reward_model"]
    assert {"folder", "models", "normalize", "max_tokens", "truncate"} == section.keys()
    assert section["models"][0]["protocol"] == "sglang"
