"""Which parameters shape a call's distribution, and of which one each engine's logprobs are."""

from typing import Any

import pytest

from agentrl.documents.sampling import distribution_params, logprobs_of

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
