"""The scorer ``reward_model`` against a server with SGLang's and vLLM's ``/classify`` over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_llm import CLOSE, HTML, FakeLLM, Reply, Request, fake_llm
from tiny_policy import tiny_format, tiny_tokenizer

from agentrl.errors import ConfigError, DependencyKind, ScorerError
from agentrl.scoring.reward_model import (
    REWARD,
    RewardModel,
    refused_endpoints,
    render_trajectory,
    reward_of,
)
from agentrl.scoring.scorers import ScorerContext, ScoreResult, run_scorer

MESSAGES = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"})
IDS = render_trajectory(tiny_format(), MESSAGES)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FakeLLM]:
    folder = tmp_path / "model"
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 4096}')
    async with fake_llm(tmp_path) as fake:
        fake.path = "/classify"
        yield fake


def config_of(server: FakeLLM, protocol: str = "sglang", **settings: Any) -> str:
    """Write the section of a reward model served by ``server``."""
    assert server.folder is not None
    values = {"folder": str(server.folder / "model"), "max_retries": 2, **settings}
    path = Path(server.write_config(REWARD, "m", **values))
    content = yaml.safe_load(path.read_text())
    for endpoint in content[REWARD]["models"]:
        endpoint["protocol"] = protocol
    path.write_text(yaml.safe_dump(content))
    return str(path)


async def scored(path: str, messages: Any = MESSAGES) -> ScoreResult:
    context = ScorerContext(query="2+2?", final_answer="4", messages=messages, agent_config_path=path)
    return await run_scorer(REWARD, context, 60)


def sum_of_ids(request: Request) -> bytes:
    if "input_ids" in request:
        return json.dumps({"embedding": [sum(request["input_ids"]) / 1000], "meta_info": {}}).encode()
    reward = sum(request["input"]) / 1000
    return json.dumps({"data": [{"index": 0, "probs": [reward], "num_classes": 1}]}).encode()


@pytest.mark.parametrize(
    ("protocol", "asked"),
    [
        ("sglang", {"input_ids": IDS}),
        ("vllm", {"model": "m", "input": IDS, "use_activation": False}),
    ],
)
async def test_the_servers_reward_is_the_score(server: FakeLLM, protocol: str, asked: Request) -> None:
    server.replies = {"": [sum_of_ids], "m": [sum_of_ids]}
    result = await scored(config_of(server, protocol))
    assert result.score == result.details["reward"] == pytest.approx(sum(IDS) / 1000)
    assert server.asked == [asked]
    assert (result.details["model"], result.details["tokens"]) == ("m", len(IDS))


@pytest.mark.parametrize(
    ("reply", "says", "is_outage"),
    [
        (HTML, "cannot be read", False),
        (b'{"embedding": [NaN]}', "cannot be read", False),
        (b'{"embedding": [0.5, 0.1]}', "cannot be read", False),
        (b'{"data": []}', "cannot be read", False),
        (400, "request refused", False),
        (503, "server error", True),
        (CLOSE, "unreachable", True),
    ],
)
async def test_a_failure_is_named_and_no_reward(
    server: FakeLLM, reply: Reply, says: str, is_outage: bool
) -> None:
    server.replies = {"": [reply]}
    with pytest.raises(
        ScorerError, match=f"scorer reward_model: no reward model gave a reward: m: {says}"
    ) as found:
        await scored(config_of(server))
    assert len(server.asked) == (1 if reply == 400 else 2)
    assert (found.value.outage is not None) == is_outage
    if found.value.outage is not None:
        assert found.value.outage.kind is DependencyKind.JUDGE


async def test_a_failure_is_asked_again(server: FakeLLM) -> None:
    server.replies = {"": [500, b'{"embedding": [Infinity]}', b'{"embedding": [-2]}']}
    assert (await scored(config_of(server, max_retries=3))).score == -2.0


async def test_a_long_trajectory_is_refused_or_loses_its_beginning(server: FakeLLM) -> None:
    server.replies = {"": [sum_of_ids]}
    with pytest.raises(ScorerError, match=f"has {len(IDS)} tokens, and the reward model reads 20"):
        await scored(config_of(server, max_tokens=20))
    assert server.asked == []
    result = await scored(config_of(server, max_tokens=20, truncate=True))
    assert server.asked == [{"input_ids": IDS[-20:]}]
    assert result.details["left_out_tokens"] == len(IDS) - 20


async def test_the_limit_is_the_context_with_its_rotary_scaling_and_is_named(server: FakeLLM) -> None:
    path = config_of(server, max_tokens=200_000)
    config = Path(str(server.folder)) / "model" / "config.json"
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    values = {"model_type": "qwen3", "max_position_embeddings": 40960, "rope_scaling": scaling}
    config.write_text(json.dumps(values))
    assert RewardModel.open(path).max_tokens == 131072
    config.write_text('{"model_type": "qwen3", "max_position_embeddings": 16}')
    with pytest.raises(ScorerError, match="reads 16: the context of") as found:
        await scored(path)
    assert "raise" not in str(found.value.hint)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ((), "no conversation"),
        (({"role": "user", "content": [{"type": "image", "sha256": "0" * 64}]},), "reads text only"),
    ],
)
async def test_what_it_cannot_read_is_no_request(server: FakeLLM, messages: Any, says: str) -> None:
    with pytest.raises(ScorerError, match=says):
        await scored(config_of(server), messages)
    assert server.asked == []


async def test_rewards_are_normalized_by_the_models_folder(server: FakeLLM, tmp_path: Path) -> None:
    server.replies = {"": [b'{"embedding": [5.0]}']}
    path = config_of(server, normalize="affine")
    with pytest.raises(ConfigError, match=r"has no rewards\.json"):
        await scored(path)
    (tmp_path / "model" / "rewards.json").write_text('{"mean": 1, "scale": 2}')
    result = await scored(path)
    assert (result.score, result.details["reward"]) == (2.0, 5.0)
    (tmp_path / "model" / "rewards.json").write_text('{"mean": 1, "scale": 4.0}')
    assert (await scored(path)).score == 1.0


async def test_a_section_that_cannot_be_used_is_named(server: FakeLLM) -> None:
    for settings, says in (
        ({"folder": "nowhere"}, r"reward_model\.folder"),
        ({"normalize": "z"}, "normalize"),
        ({"protocol": "x"}, "protocol"),
    ):
        path = config_of(server, **settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=says):
            RewardModel.open(path)


@pytest.mark.parametrize(
    ("reply", "wrong", "down"),
    [
        (b'{"embedding": [0.5]}', 0, 0),
        (b'{"embedding": [0.5, 0.5]}', 1, 0),
        (404, 1, 0),
        (400, 1, 0),
        (503, 0, 1),
        (CLOSE, 0, 1),
    ],
)
async def test_a_server_is_tried_before_rollouts(
    server: FakeLLM, reply: Reply, wrong: int, down: int
) -> None:
    server.replies = {"": [reply]}
    found = await refused_endpoints(RewardModel.open(config_of(server)))
    assert (len(found[0]), len(found[1])) == (wrong, down)
    assert all("--is-embedding" in problem for problem in found[0])


@pytest.mark.parametrize(
    "reply",
    ["", "[]", "null", "{}", '{"embedding": 1}', '{"embedding": [true]}', '{"data": [{"probs": []}]}'],
)
def test_other_replies_hold_no_reward(reply: str) -> None:
    assert reward_of(reply) is None
