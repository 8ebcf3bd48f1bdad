"""How a model call was sampled: the temperature to train it with, and whether it can be trained at all."""

from __future__ import annotations

import math
from typing import Any, Final

from agentrl.documents.dispatch import DispatchedSamplingTask
from agentrl.documents.sampling import shaping
from agentrl.errors import StoreError

_COLDEST: Final = 0.01
"""Engines sample lower temperatures greedily, or raise them to this one."""
_SHOWN: Final = 60
"""Characters of a parameter's value in a reason."""


def call_temperature(call: DispatchedSamplingTask) -> float:
    """Return the temperature that ``call`` was sampled with: 1 where its document names none.

    Raises StoreError for anything but a finite number from 0 on.
    """
    value = call.sampling_params.get("temperature")
    if value is None:
        return 1.0
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise StoreError(f"call {call.id} was sampled at temperature {_shown(value)}")
    return float(value)


def masked_because(call: DispatchedSamplingTask) -> str | None:
    """Return the parameter, with its value, that keeps the tokens of ``call`` out of training; None if none.

    The trainer computes softmax(logits/temperature). A call that a parameter shaped further (top-p, a
    penalty, a grammar) was drawn from another distribution: its importance ratios are right only where its
    logprobs are of the distribution that it was drawn from (``logprobs_of``).
    """
    temperature = call_temperature(call)
    if temperature < _COLDEST:
        return f"temperature {temperature:g}"
    if call.logprobs_of == "sampled":
        return None
    for name in shaping(call.sampling_params):
        return f"{name} {_shown(call.sampling_params[name])}"
    return "logprobs of several distributions" if call.logprobs_of == "other" else None


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
