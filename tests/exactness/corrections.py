"""List the corrections of each loss under each π_old, with bounds that act on the test steps."""

from __future__ import annotations

from agentrl.config.training import OLD_LOGPROBS, OldLogprobs
from agentrl.losses.loss import LOSSES

_MASKS = ("icepop:0.5:4", "seq_icepop:0:1.5", "token_mask:0.5:3", "seq_mask:0.7:1.5", "seq_kl:0.6")
_WEIGHTS = ("tis:1.5", "seq_tis:1.5", "tis:1.5,seq_mask:0.7:1.5", "seq_tis:1.5,token_mask:0.5:3")


def corrections_of(loss: str, old_logprobs: str) -> tuple[str, ...]:
    """Return the valid values of ``--importance_correction`` for a loss and π_old; the first is none."""
    declared = LOSSES.get(loss)
    if not declared.from_policy:
        return ("",)
    weighs = old_logprobs != "behavior" or declared.contains_weight
    return ("", *_MASKS, *(_WEIGHTS if weighs else ()))


def cases_of(loss: str) -> list[tuple[OldLogprobs, str]]:
    """Return every pair of ``--old_logprobs`` and ``--importance_correction``."""
    old_logprobs = ("behavior",) if LOSSES.get(loss).compares_behavior else OLD_LOGPROBS
    return [(old, correction) for old in old_logprobs for correction in corrections_of(loss, old)]
