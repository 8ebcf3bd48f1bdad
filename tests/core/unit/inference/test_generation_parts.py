"""A generation is joined from parts, and a cancelled one is kept for a later call."""

from __future__ import annotations

from agentrl.documents.model_call import VersionSpan
from agentrl.documents.sampling import SamplingParams
from agentrl.inference.engine import FinishReason, Generation
from agentrl.inference.session import GenerationParts


def part(*ids: int, cached: int, reason: FinishReason = "abort") -> Generation:
    spans = (VersionSpan(version=1, start=0, end=len(ids)),) if ids else ()
    return Generation(
        output_ids=ids, logprobs=(-0.5,) * len(ids), versions=spans,
        finish_reason=reason, prompt_tokens=2, cached_tokens=cached, seconds=0.0, engine_url="",
    )  # fmt: skip


def test_a_part_without_tokens_does_not_say_what_was_cached() -> None:
    made = GenerationParts([1, 2], SamplingParams(max_new_tokens=9), None, None)
    made.add(part(cached=0))
    made.add(part(3, 4, cached=7))
    kept = made.kept()
    assert kept is not None
    assert kept.cached_tokens == 7
    assert made.whole(0.0).cached_tokens == 0
