"""Prompts and generations stay within the model's context, and what does not fit ends with a name."""

import json
from pathlib import Path

import pytest
from trajectories import ADD, ANSWER, Trajectory

from agentrl.calls.prompts import Budget, context_problem
from agentrl.chat.model_folder import context_length, model_context_length
from agentrl.config.schema import AgentConfig, ModelConfig, SamplingConfig
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import StopReason
from agentrl.errors import ConfigError

QWEN3 = 40960


def test_a_generation_gets_what_the_prompt_leaves() -> None:
    budget = Budget(AgentConfig(), QWEN3)
    params = SamplingParams(max_new_tokens=32768)
    assert budget.clamp(params, 100) is params
    assert budget.clamp(params, 20000).max_new_tokens == QWEN3 - 20000
    assert budget.clamp(params, QWEN3 - 1).max_new_tokens == 1
    assert Budget(AgentConfig(), None).clamp(params, 10**6) is params


def test_the_smaller_of_flag_and_context_limits_the_prompt() -> None:
    config = AgentConfig(max_prompt_tokens=32768, prompt_reserve_tokens=1024)
    assert Budget(config, QWEN3).full_at == 32768 - 1024
    assert Budget(config, None).full_at == 32768 - 1024
    assert (Budget(config, 8192).prompt_limit, Budget(config, 8192).full_at) == (8191, 8191 - 1024)
    assert Budget(config, 1000).full_at == 999 - 249


def test_the_default_limits_do_not_fit_qwen3_and_the_check_says_so() -> None:
    problem = context_problem(AgentConfig(), SamplingConfig(), QWEN3)
    assert problem is not None
    assert "--max_prompt_tokens 32768 + --max_new_tokens 8196 exceed the context of 40960" in problem
    assert context_problem(AgentConfig(), SamplingConfig(max_new_tokens=8192), QWEN3) is None
    assert context_problem(AgentConfig(), SamplingConfig(), None) is None


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"text_config": {"max_position_embeddings": 262144}}, 262144),
        ({"n_positions": 1024}, 1024),
        ({"hidden_size": 64}, None),
        ([1], None),
        (None, None),
    ],
)
def test_the_context_length_of_a_model_is_read_from_its_configuration(
    config: object, length: int | None, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_context_length(tmp_path) == length


def test_a_longer_context_than_the_models_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    for given, length in ((None, 4096), (1024, 1024), (4096, 4096)):
        assert context_length(ModelConfig(max_model_len=given), tmp_path) == length
    with pytest.raises(ConfigError, match="--max_model_len 4097 is more than the 4096 tokens"):
        context_length(ModelConfig(max_model_len=4097), tmp_path)
    assert context_length(ModelConfig(max_model_len=9), None) == 9


async def test_each_call_asks_for_what_its_prompt_leaves_of_the_context() -> None:
    trajectory = Trajectory(ADD, ANSWER)
    trajectory.engine.context_length = 8300
    assert (await trajectory.run()).stop_reason is StopReason.ANSWERED
    for call, prompt in zip(trajectory.calls, trajectory.engine.prompts, strict=True):
        assert call.sampling_params["max_new_tokens"] == min(8196, 8300 - len(prompt))
    assert trajectory.calls[-1].sampling_params["max_new_tokens"] < 8196


async def test_a_prompt_beyond_the_context_meets_its_manager_or_ends_with_a_named_reason() -> None:
    reasons = {"disabled": StopReason.LENGTH_LIMIT, "discard_all_tools": StopReason.ANSWERED}
    for manager, reason in reasons.items():
        trajectory = Trajectory(ADD, ANSWER, new_context=manager)
        trajectory.engine.context_length = 1500
        trajectory.tools.text = "x" * 1500
        assert (await trajectory.run()).stop_reason is reason
        assert all(len(prompt) < 1500 for prompt in trajectory.engine.prompts)
