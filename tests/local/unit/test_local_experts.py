"""The local engine's experts: of the tokens that are asked for, also from the cache; replaying them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_engine import cpu_model, request_of, work_off
from tiny_models import VOCABULARY, tiny_model
from transformers import Qwen3MoeForCausalLM

from agentrl.data.forest import ForestRouting, forest_from_sequences
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.model_call import ExpertShape
from agentrl.local.engine import model as local_model
from agentrl.local.engine.scheduler import GenerationRequest, Scheduler
from agentrl.model.logprobs import ForwardOptions
from agentrl.model.routing import RouterReplay

SHAPE = ExpertShape(layers=3, top_k=4, experts=16)
NEW = 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A mixture in bfloat16."""
    model: Any = tiny_model(
        "qwen3_moe", num_hidden_layers=3, hidden_size=64, moe_intermediate_size=64, num_experts=16,
        num_experts_per_tok=4, initializer_range=0.125,
    )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def sampled(scheduler: Scheduler, *prompts: list[int], **changes: Any) -> list[GenerationRequest]:
    """The finished requests of ``prompts``, in their order."""
    done: dict[str, GenerationRequest] = {}
    for number, prompt in enumerate(prompts):
        fields = {"routed_from": 0, **changes}
        request = request_of(prompt, NEW, lambda each: done.update({each.rid: each}), number, **fields)
        scheduler.submit(request)
    work_off(scheduler)
    return [done[str(number)] for number in range(len(prompts))]


def test_replaying_removes_most_of_what_bfloat16_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_model, "_held_dtype", lambda *_, **__: torch.bfloat16)
    engine = cpu_model(folder, torch.bfloat16)
    scheduler = Scheduler(engine, engine.new_cache(8192), version="0", max_running=32)
    rng = np.random.default_rng(0)
    requests = sampled(scheduler, *(rng.integers(0, VOCABULARY, 8).tolist() for _ in range(16)))
    forest = forest_from_sequences(
        [request.tokens.tolist() for request in requests], [[False] * 8 + [True] * NEW] * len(requests)
    )
    free = np.full((1, SHAPE.layers, SHAPE.top_k), -1)
    stored = [np.concatenate([request.routing, free]) for request in requests if request.routing is not None]
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    RouterReplay.install(model, SHAPE)
    behavior = np.concatenate([request.logprobs for request in requests])
    divergences = []
    for routing in (None, ForestRouting(np.concatenate(stored).astype(np.int16))):
        with torch.no_grad():
            ((logprobs, _),) = ParallelModel(model, trains=False).logprobs(
                [replace(forest, routing=routing)], ForwardOptions()
            )
        log_ratio = logprobs.numpy() - behavior
        divergences.append(float(np.mean(np.expm1(log_ratio) - log_ratio)))
    own, replayed = divergences
    assert own > 1e-5
    assert replayed <= own / 5


def test_cached_tokens_keep_their_experts(folder: Path) -> None:
    engine = cpu_model(folder)
    scheduler = Scheduler(engine, engine.new_cache(2048), version="0", max_running=4)
    (first,) = sampled(scheduler, [1, 2, 3, 4])
    assert first.routing is not None
    assert first.routing.shape == (4 + NEW - 1, SHAPE.layers, SHAPE.top_k)
    again = first.tokens[:40].tolist()
    second, branch = sampled(scheduler, [*again, 5], [*again, 6, 7])
    assert (second.cached_tokens or 0) >= 40
    for request in (second, branch):
        assert request.routing is not None
        assert (request.routing[:40] == first.routing[:40]).all()
    (part,) = sampled(scheduler, [*again, 5], routed_from=39)
    assert part.routing is not None
    assert len(part.routing) == 2 + NEW - 1
    assert (part.routing[0] == first.routing[39]).all()
    (none,) = sampled(scheduler, [1, 2], routed_from=None)
    assert none.routing is None
