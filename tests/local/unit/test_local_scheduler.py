"""Batching, KV cache and sampling of the local engine, with a model whose next token follows a rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_engine import request_of, work_off
from torch import Tensor

from agentrl.base.device_lease import return_freed_memory
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ModelError
from agentrl.local.engine.model import Chunk, KVCache
from agentrl.local.engine.scheduler import GenerationRequest, RowSampler, Scheduler, StopStrings, sample

VOCAB = 97
STOP = 96


class RuleModel:
    """The next token is (sum of all ids so far + shift) mod 90, computed from what the cache holds."""

    vocab_size = VOCAB
    eos_ids = frozenset({STOP})

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift
        self.computed = 0
        self.batches: list[int] = []
        self.is_loaded = True

    def unload(self) -> None:
        self.is_loaded = False

    def forward(self, chunks: Sequence[Chunk], cache: KVCache) -> Tensor:
        wanted = []
        for chunk in chunks:
            self.computed += len(chunk.token_ids)
            first = chunk.slot.start + chunk.start
            assert chunk.start + len(chunk.token_ids) <= chunk.slot.capacity
            ids = torch.from_numpy(chunk.token_ids.astype(np.float32))
            cache.keys[0][first : first + len(ids), 0, 0] = ids
            if chunk.wants_logits:
                seen = cache.keys[0][chunk.slot.start : first + len(chunk.token_ids), 0, 0].sum()
                wanted.append((int(seen) + self.shift) % 90)
        self.batches.append(len(chunks))
        logits = torch.full((len(wanted), VOCAB), -50.0)
        logits[range(len(wanted)), wanted] = 50.0
        return logits


class Words:
    """Decodes the id 65 to A, and so on."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def rule(prompt: Sequence[int], count: int, shift: int = 0) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append((sum(ids) + shift) % 90)
    return ids[len(prompt) :]


class Harness:
    """A scheduler, its model, and the requests that have ended."""

    def __init__(self, max_tokens: int = 4096, max_running: int = 8) -> None:
        self.model = RuleModel()
        cache = KVCache(
            num_layers=1, max_tokens=max_tokens, num_kv_heads=1, head_dim=1,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        self.scheduler = Scheduler(self.model, cache, version="0", max_running=max_running, chunk_tokens=16)
        self.ended: dict[str, GenerationRequest] = {}

    def submit(
        self, rid: str, prompt: Sequence[int], count: int, stop: frozenset[int] = frozenset()
    ) -> GenerationRequest:
        request = request_of(prompt, count, self.end, rid=rid, stop_ids=stop)
        self.scheduler.submit(request)
        return request

    def end(self, request: GenerationRequest) -> None:
        self.ended[request.rid] = request

    def run(self) -> None:
        work_off(self.scheduler)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.scheduler.step()


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_requests_of_all_lengths_get_their_own_tokens() -> None:
    harness = Harness(max_running=3)
    prompts = {f"r{n}": [(7 * n + k) % 50 for k in range(1 + 9 * n)] for n in range(7)}
    for rid, prompt in prompts.items():
        harness.submit(rid, prompt, 20)
    harness.run()
    assert {rid: request.output_ids for rid, request in harness.ended.items()} == {
        rid: rule(prompt, 20) for rid, prompt in prompts.items()
    }
    assert max(harness.model.batches) == 3
    assert all(r.finish_reason == {"type": "length", "length": 20} for r in harness.ended.values())


def test_a_stop_string_ends_a_request(harness: Harness) -> None:
    request = harness.submit("r", [5, 6], 20)
    expected = rule([5, 6], 20)
    stop = "".join(map(chr, expected[3:6]))
    request.stop_strings = StopStrings(Words(), ["never", stop])  # type: ignore[arg-type]
    harness.run()
    assert harness.ended["r"].output_ids == expected[:6]
    assert harness.ended["r"].finish_reason == {"type": "stop", "matched": stop}


def test_a_stop_token_ends_a_request(harness: Harness) -> None:
    expected = rule([5, 6], 20)
    harness.submit("r", [5, 6], 20, frozenset({expected[4]}))
    harness.run()
    first = expected.index(expected[4])
    assert harness.ended["r"].output_ids == expected[: first + 1]
    assert harness.ended["r"].finish_reason == {"type": "stop", "matched": expected[4]}


def test_a_common_prefix_is_computed_once_even_when_all_arrive_together(harness: Harness) -> None:
    prefix = [n % 50 for n in range(100)]
    for n in range(8):
        harness.submit(f"r{n}", [*prefix, n], 1)
    harness.run()
    assert harness.model.computed == 100 + 8
    assert sorted(r.cached_tokens or 0 for r in harness.ended.values()) == [0] + [100] * 7
    assert all(harness.ended[f"r{n}"].output_ids == rule([*prefix, n], 1) for n in range(8))


def test_the_next_turn_continues_where_the_last_ended(harness: Harness) -> None:
    harness.submit("one", list(range(40)), 10)
    harness.run()
    following = [*range(40), *harness.ended["one"].output_ids, 3, 4]
    harness.submit("two", following, 5)
    harness.run()
    assert harness.ended["two"].cached_tokens == 49
    assert harness.ended["two"].output_ids == rule(following, 5)


def test_a_full_cache_retracts_the_latest_and_loses_nothing() -> None:
    harness = Harness(max_tokens=256, max_running=4)
    prompts = {f"r{n}": [n + 1] * 30 for n in range(4)}
    for rid, prompt in prompts.items():
        harness.submit(rid, prompt, 190)
    harness.run()
    assert {rid: r.output_ids for rid, r in harness.ended.items()} == {
        rid: rule(prompt, 190) for rid, prompt in prompts.items()
    }
    assert sum(slot.computed for slot in harness.scheduler.cache._slots) <= 256


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_after_a_pause_only_the_weights_differ(harness: Harness, mode: str) -> None:
    request = harness.submit("r", [1, 2, 3], 12)
    harness.step(5)
    harness.scheduler.pause(mode)  # type: ignore[arg-type]
    assert not harness.scheduler.has_work
    before = request.output_ids
    harness.scheduler.replace_model(RuleModel(shift=1), "7")
    harness.scheduler.cache.drop_idle()
    harness.scheduler.paused = False
    harness.run()
    made = harness.ended["r"]
    assert made.output_ids == before + rule([1, 2, 3, *before], 12 - len(before), shift=1)
    assert made.spans == [
        {"version": "0", "start": 0, "end": len(before)},
        {"version": "7", "start": len(before), "end": 12},
    ]
    assert made.retractions == (mode == "retract")


def test_released_memory_is_given_back_and_requests_go_on_with_other_weights() -> None:
    harness = Harness(max_tokens=2**24)
    scheduler = harness.scheduler
    harness.submit("r", [5, 6], 8)
    harness.step(4)
    scheduler.pause("in_place")
    with pytest.raises(ModelError, match="no request runs"):
        scheduler.release_memory(["weights"])
    scheduler.pause("retract")
    for tensor in (*scheduler.cache.keys, *scheduler.cache.values):
        tensor.zero_()
    process = psutil.Process()
    before = process.memory_info().rss
    scheduler.release_memory(["kv_cache", "weights"])
    return_freed_memory()
    assert process.memory_info().rss < before - 2**26  # of 2**27
    with pytest.raises(ModelError, match="resume_memory_occupation"):
        scheduler.resume()
    scheduler.cache.allocate()
    scheduler.replace_model(RuleModel(shift=3), "1", flush=True)
    scheduler.resume()
    harness.run()
    first = rule([5, 6], 4)
    assert harness.ended["r"].output_ids == first + rule([5, 6, *first], 4, shift=3)


def test_abort_ends_one_or_all_requests_with_their_tokens() -> None:
    harness = Harness(max_running=1)
    for rid in ("a", "ab", "c"):
        harness.submit(rid, [1, 2], 50)
    harness.step(3)
    assert harness.scheduler.abort("a") == 1
    assert len(harness.ended["a"].output_ids) == 3
    assert harness.scheduler.abort(None) == 2
    assert {r.finish_reason["type"] for r in harness.ended.values() if r.finish_reason} == {"abort"}
    assert not harness.scheduler.has_work


def test_no_request_starts_while_draining(harness: Harness) -> None:
    harness.submit("old", [1], 5)
    harness.scheduler.step()
    harness.scheduler.draining = True
    harness.submit("new", [2], 5)
    harness.run()
    assert list(harness.ended) == ["old"]
    harness.scheduler.draining = False
    harness.run()
    assert harness.ended["new"].output_ids == rule([2], 5)


def test_a_failed_forward_pass_ends_every_request() -> None:
    harness = Harness(max_running=1)
    for rid in ("a", "b"):
        harness.submit(rid, [1, 2], 5)
    harness.scheduler.step()
    harness.scheduler.fail_all(RuntimeError("out of memory"))
    assert all("out of memory" in str(r.finish_reason) for r in harness.ended.values())
    assert set(harness.ended) == {"a", "b"}
    assert sum(slot.computed for slot in harness.scheduler.cache._slots) == 0


def sampler(seed: int = 0, **params: float) -> RowSampler:
    return RowSampler(SamplingParams(**params), np.random.default_rng(seed))  # type: ignore[arg-type]


def logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def frequencies(row: torch.Tensor, one: RowSampler, draws: int) -> torch.Tensor:
    batch = 500
    drawn = [sample(row.repeat(batch, 1), [one] * batch)[0] for _ in range(draws // batch)]
    return torch.bincount(torch.tensor(drawn).flatten(), minlength=row.numel()) / draws


@pytest.mark.parametrize("vocab", [7, 256, 1000])
def test_tokens_are_drawn_in_proportion_to_their_probability(vocab: int) -> None:
    row = logits(1, vocab)[0]
    draws = 40_000
    expected = (row / 0.8).softmax(-1)
    found = frequencies(row, sampler(temperature=0.8), draws)
    sigma = (expected * (1 - expected) / draws).sqrt()
    assert ((found - expected).abs() <= 5 * sigma + 2 / draws).all()


CUTS: list[dict[str, float]] = [
    {}, {"top_k": 1}, {"top_k": 3}, {"top_p": 0.4}, {"top_p": 0.9999}, {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.05},
]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_logprobs_are_those_of_the_sampled_distribution(cut: dict[str, float]) -> None:
    batch = logits(1, 300).repeat(400, 1)
    tokens, logprobs = sample(batch.clone(), [sampler(seed, temperature=0.7, **cut) for seed in range(400)])
    probs = (batch[0].double() / 0.7).softmax(-1)
    ordered, order = probs.sort(descending=True)
    keep = torch.arange(300) < cut.get("top_k", 300)
    keep &= ordered.cumsum(-1) - ordered <= cut.get("top_p", 1.0)
    keep &= ordered >= cut.get("min_p", 0.0) * ordered[0]
    kept = probs[order[keep]].sum()
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert token in order[keep]
        assert logprob == pytest.approx(float((probs[token] / kept).log()), abs=1e-5)


def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one() -> None:
    batch = logits(3, 500)
    tokens, logprobs = sample(batch.clone(), [sampler(temperature=0.0)] * 3)
    assert tokens == batch.argmax(-1).tolist()
    assert logprobs == pytest.approx(batch.log_softmax(-1).max(-1).values.tolist(), abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    top_k=st.sampled_from([-1, 1, 2, 40, 70, 5000]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    vocab=st.sampled_from([3, 64, 65, 3000]),
    scale=st.sampled_from([0.01, 1.0, 8.0]),
    seed=st.integers(0, 1000),
)
def test_sampled_tokens_respect_every_limit(
    top_k: int, top_p: float, min_p: float, vocab: int, scale: float, seed: int
) -> None:
    row = logits(1, vocab, seed, scale)
    token = sample(row.clone(), [sampler(seed, top_k=top_k, top_p=top_p, min_p=min_p)])[0][0]
    probs = row[0].double().softmax(-1)
    larger = probs > probs[token]
    assert top_k < 0 or int(larger.sum()) < top_k
    assert top_p == 1.0 or float(probs[larger].sum()) <= top_p + 1e-5
    assert float(probs[token]) >= min_p * float(probs.max()) * (1 - 1e-5)


def test_top_p_over_a_flat_vocabulary_reaches_beyond_the_first_candidates() -> None:
    found = frequencies(torch.zeros(3000), sampler(top_p=0.6), 3000)
    assert 1100 < int((found > 0).sum()) <= 1802


def test_a_row_depends_only_on_its_own_seed() -> None:
    batch = logits(3, 400)
    alone = [sample(batch[row : row + 1].clone(), [sampler(row)])[0][0] for row in range(3)]
    mixed = [sampler(0), sampler(1), sampler(2)]
    assert sample(batch.clone(), mixed)[0] == alone


def test_penalties_follow_their_definitions() -> None:
    one = sampler(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    for token in (1, 1, 2):
        one.record(token)
    row = torch.tensor([[0.0, 5.0, -1.0, 1.9]])
    _, logprobs = sample(row.clone(), [one])
    penalized = torch.tensor([0.0, (5.0 - 0.5 - 0.5) / 2, (-1.0 - 0.5 - 0.25) * 2, 1.9])
    assert logprobs[0] == pytest.approx(float(penalized.log_softmax(-1)[1]), abs=1e-6)


def test_a_token_without_probability_is_never_drawn() -> None:
    row = torch.full((600,), float("-inf"))
    row[[3, 300, 599]] = 0.0
    found = frequencies(row, sampler(), 3000)
    assert found.nonzero()[:, 0].tolist() == [3, 300, 599]
