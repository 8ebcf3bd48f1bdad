"""Read a call's sampling parameters: its temperature, and whether its tokens can be trained."""

from __future__ import annotations

import math
from typing import Any, Final

from agentrl.documents.dispatch import DispatchedSamplingTask
from agentrl.documents.sampling import COLDEST, shaping

_SHOWN: Final = 60
"""Characters of a parameter's value in a reason."""


def call_temperature(call: DispatchedSamplingTask) -> float | None:
    """Return the temperature to train ``call`` with; None if it is too low or not a number.

    It is 1 where the document names none.
    """
    value = call.sampling_params.get("temperature")
    if value is None:
        return 1.0
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and COLDEST <= value < math.inf else None


def masked_because(call: DispatchedSamplingTask) -> str | None:
    """Return the parameter and value that mask the tokens of ``call``; None if they can be trained.

    The trainer computes softmax(logits/temperature). A call that a parameter shaped further (top-p, a
    penalty, a grammar) was drawn from another distribution: its importance ratios are right only where its
    logprobs are of the distribution that it was drawn from (``logprobs_of``).
    """
    if call_temperature(call) is None:
        return f"temperature {_shown(call.sampling_params['temperature'])}"
    if call.logprobs_of == "sampled":
        return None
    for name in shaping(call.sampling_params):
        return f"{name} {_shown(call.sampling_params[name])}"
    return "logprobs of several distributions" if call.logprobs_of == "other" else None


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
