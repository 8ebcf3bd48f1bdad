"""Batching and KV cache of the local engine, with a model whose next token follows a rule."""

from collections.abc import Sequence

import numpy as np
import psutil
import pytest
import torch
from local_engine import request_of, work_off
from torch import Tensor

from agentrl.base.device_lease import return_freed_memory
from agentrl.errors import ModelError
from agentrl.local.engine.model import Chunk, KVCache
from agentrl.local.engine.scheduler import GenerationRequest, Scheduler, StopStrings

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
