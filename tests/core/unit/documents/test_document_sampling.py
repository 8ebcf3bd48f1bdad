"""Sampling parameters: as a person writes them, which shape the distribution, whose logprobs engines give."""

from typing import Any

import pytest

from agentrl.documents.sampling import SamplingParams, distribution_params, logprobs_of
from agentrl.errors import ConfigError

PLAIN: dict[str, Any] = {
    "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "repetition_penalty": 1.0, "max_new_tokens": 9, "stop_token_ids": [3],
    "sampling_seed": 7, "ignore_eos": True, "stop": ["\n"], "logit_bias": None, "regex": "",
}  # fmt: skip


def test_temperature_ends_and_seeds_shape_nothing() -> None:
    assert distribution_params(PLAIN) == ()
    assert [logprobs_of(engine, PLAIN) for engine in ("local", "sglang", "vllm")] == ["policy"] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0}, {"temperature": 0.005}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1},
        {"presence_penalty": -0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1.0}}, {"regex": "[a-z]*"}, {"min_new_tokens": 4}, {"of_another_engine": True},
    ],
)  # fmt: skip
def test_what_shapes_is_named(changes: dict[str, Any]) -> None:
    assert distribution_params(PLAIN | changes) == tuple(changes)


CUT, PENALISED = {"top_p": 0.9}, {"presence_penalty": 0.5}


@pytest.mark.parametrize(
    ("changes", "local", "sglang", "vllm"),
    [
        (CUT, "sampled", "policy", "sampled"),
        (PENALISED, "sampled", "sampled", "sampled"),
        (CUT | PENALISED, "sampled", "other", "sampled"),
        ({"top_k": 1}, "sampled", "other", "sampled"),
        ({"top_k": 1, "temperature": 1.0}, "sampled", "policy", "sampled"),
        ({"temperature": 0.005}, "other", "other", "other"),
        ({"temperature": 0.0}, "policy", "policy", "policy"),
        ({"temperature": 0.0} | CUT, "policy", "policy", "other"),
        ({"temperature": 0.0} | PENALISED, "other", "other", "other"),
    ],
)
def test_each_engine_has_its_own_order(changes: dict[str, Any], local: str, sglang: str, vllm: str) -> None:
    found = [logprobs_of(engine, PLAIN | changes) for engine in ("local", "sglang", "vllm")]
    assert found == [local, sglang, vllm]


def test_the_original_scripts_parameters_are_read() -> None:
    text = '{"temperature": 1, "min_p": 0, "top_k": -1, "stop_token_ids": [2, 3], "extra": {"n": 1}}'
    params = SamplingParams.from_json(text)
    assert (params.temperature, params.top_k, params.stop_token_ids) == (1.0, -1, (2, 3))
    request = params.replace(max_new_tokens=5).to_request()
    assert (request["max_new_tokens"], request["stop_token_ids"], request["n"]) == (5, [2, 3], 1)
    assert "extra" not in request


@pytest.mark.parametrize("text", ["", "{}"])
def test_nothing_means_the_policy_itself(text: str) -> None:
    assert SamplingParams.from_json(text) == SamplingParams()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temprature": 1}', "(?s)temprature.*temperature"),
        ('{"top_p": "high"}', "top_p"),
        ('{"top_k": 1.5}', "top_k"),
        ('{"top_k": 0}', "top_k"),
        ('{"top_p": 0}', "top_p"),
        ('{"temperature": -1}', "temperature"),
        ('{"max_new_tokens": true}', "max_new_tokens"),
        ("[1]", "a mapping"),
        ("{temperature: 1}", "not JSON"),
        ('{"top_kk": 1}', "extra"),
    ],
)
def test_a_wrong_parameter_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams.from_json(text)


def test_a_seed_follows_from_its_key_alone() -> None:
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    params = SamplingParams()
    seeds = [params.seeded(0, "train/0/a", traj, turn).extra["sampling_seed"] for traj, turn in places]
    again = [params.seeded(0, "train/0/a", traj, turn).extra["sampling_seed"] for traj, turn in places]
    assert seeds == again
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert params.seeded(1, "train/0/a", 0, 0).extra["sampling_seed"] not in seeds


def test_a_seed_that_a_person_gives_stays() -> None:
    params = SamplingParams.from_json('{"extra": {"sampling_seed": 5}}')
    assert params.seeded(1, 2) is params
