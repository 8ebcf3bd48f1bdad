"""The load of an engine and the figures of its metrics, as SGLang 0.5.23 and vLLM 0.32 write them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.documents.run import EngineFigures
from agentrl.inference.client import EngineClient, metric
from agentrl.inference.engine import EngineRefusedError
from agentrl.inference.engines.clients import engine_client

LOADS = {
    "loads": [
        {
            "num_running_reqs": 3, "num_waiting_reqs": 1, "num_total_tokens": 700,
            "max_total_num_tokens": 1000, "token_usage": 0.5,
        },
        {"num_running_reqs": 2, "max_total_num_tokens": 1000, "token_usage": 0.75},
    ]
}  # fmt: skip
SGLANG = """\
# HELP sglang:realtime_tokens_total Total number of tokens processed (updated on each log interval).
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{engine_type="unified",mode="prefill_compute",model_name="m{1}",tp_rank="0"} 900.0
sglang:realtime_tokens_total{engine_type="unified",mode="prefill_cache",model_name="m{1}",tp_rank="0"} 300.0
sglang:realtime_tokens_total{engine_type="unified",mode="decode",model_name="m{1}",tp_rank="0"} 1.2e+03
sglang:realtime_tokens_total{engine_type="unified",mode="decode",model_name="m{1}",tp_rank="1"} 100.0
"""
RETRACTED = 'sglang:num_retracted_requests_total{model_name="m"} 2.0\n'
VLLM = """\
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:generation_tokens_total{engine="0",model_name="m"} 4000.0
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 900.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 600.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="573",num_gpu_blocks_override="None"} 1.0
"""


class Http:
    """Answers by path; refuses what it does not have."""

    def __init__(self, **answers: str) -> None:
        self.answers = {f"/{name}": text for name, text in answers.items()}
        self.asked: list[str] = []

    async def respond(self, method: str, path: str, *_: object) -> tuple[str, bytes]:
        self.asked.append(path)
        if path not in self.answers:
            raise EngineRefusedError(f"no {path}")
        return "text/plain", self.answers[path].encode()

    async def call(self, method: str, path: str, *_: object) -> dict[str, Any]:
        return LOADS


def client(engine: str, **answers: str) -> tuple[EngineClient, Http]:
    made, http = engine_client(engine, "http://e", vocab_size=8), Http(**answers)
    made._http = http  # type: ignore[assignment]
    return made, http


async def figures(engine: str, metrics: str) -> EngineFigures | None:
    found = (await client(engine, metrics=metrics)[0].load()).figures
    return None if found is None else replace(found, at=0.0)


async def test_sglangs_figures() -> None:
    expected = EngineFigures(
        at=0.0, running=5, waiting=1, kv_usage=0.75, capacity=2000, generated=1300, computed=900, preempted=0
    )
    assert await figures("sglang", SGLANG) == expected
    assert await figures("sglang", SGLANG + RETRACTED) == replace(expected, preempted=2)


async def test_vllms_figures() -> None:
    assert await figures("vllm", VLLM) == EngineFigures(
        at=0.0, running=5, waiting=2, kv_usage=0.25, capacity=9168, generated=4000, computed=300, preempted=3
    )


@pytest.mark.parametrize("engine", ["sglang", "local"])
async def test_without_metrics_there_is_a_load_and_they_are_asked_for_once(engine: str) -> None:
    made, http = client(engine)
    for _ in range(2):
        load = await made.load()
        assert (load.requests, load.tokens, load.figures) == (6, 700, None)
    assert http.asked == ["/metrics"]


async def test_vllm_without_statistics_has_no_figures() -> None:
    assert await figures("vllm", 'python_info{version="3.12"} 1.0\n') is None


async def test_a_vllm_that_refuses_its_metrics_once_is_asked_again() -> None:
    """Its requests are counted there: without them it would look idle, and get all of them."""
    made, http = client("vllm")
    with pytest.raises(EngineRefusedError):
        await made.load()
    http.answers["/metrics"] = VLLM
    assert (await made.load()).requests == 7


def test_a_metric_is_found_by_its_whole_name_and_a_label() -> None:
    assert metric("a_total 1\na_total_more 2\nb_a_total 3\n", "a_total") == [1.0]
    assert metric(SGLANG, "sglang:realtime_tokens_total", 'mode="decode"') == [1200.0, 100.0]
    assert metric(VLLM, "vllm:num_requests_waiting") == [2.0]
