"""Convert an unfinished generation to the document in which it is kept, and back."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.documents.model_call import (
    PartialGeneration,
    pack_floats,
    pack_ids,
    prompt_digest,
    unpack_floats,
    unpack_ids,
)
from agentrl.inference.generation import Generation, join


def kept(input_ids: Sequence[int], parts: Sequence[Generation]) -> PartialGeneration | None:
    """Return the tokens of ``parts``, generated after ``input_ids``; None if there are none."""
    parts = [part for part in parts if part.output_ids]
    if not parts:
        return None
    whole = join(parts, "abort", len(input_ids), 0.0)
    return PartialGeneration(
        prompt=prompt_digest(input_ids),
        output_ids=pack_ids(whole.output_ids),
        logprobs=pack_floats(whole.logprobs),
        logprobs_of=whole.logprobs_of,
        versions=whole.versions,
        cached_tokens=whole.cached_tokens,
    )


def resumed(partial: PartialGeneration, prompt_tokens: int) -> Generation:
    """Return the kept tokens as an aborted generation."""
    return Generation(
        output_ids=tuple(unpack_ids(partial.output_ids).tolist()),
        logprobs=tuple(unpack_floats(partial.logprobs).tolist()),
        versions=partial.versions,
        finish_reason="abort",
        prompt_tokens=prompt_tokens,
        cached_tokens=partial.cached_tokens,
        seconds=0.0,
        engine_url="",
        logprobs_of=partial.logprobs_of,
    )
