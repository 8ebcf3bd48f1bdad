"""PartialGeneration: the tokens of an unfinished generation, which the next attempt resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.documents.base import Document
from agentrl.documents.model_call import VersionSpan
from agentrl.documents.packing import pack_ids
from agentrl.documents.sampling import LogprobsOf


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGeneration(Document):
    """The tokens so far of one generation, with the policy versions that sampled them."""

    prompt: str
    """Digest of the prompt's ids; only a call with the same prompt is resumed."""
    output_ids: bytes
    """int32 ids of the generated tokens."""
    logprobs: bytes
    """float32 logprob of each output id."""
    logprobs_of: LogprobsOf
    versions: tuple[VersionSpan, ...]
    cached_tokens: int = 0


def prompt_digest(ids: Sequence[int]) -> str:
    """Return the digest of a prompt's ids."""
    return hashlib.blake2b(pack_ids(ids), digest_size=16).hexdigest()
