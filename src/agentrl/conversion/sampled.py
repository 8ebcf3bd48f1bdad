"""The sampling parameters of a model call → the temperature to train it with, and what else shaped it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from agentrl.documents.dispatch import DispatchedSamplingTask
from agentrl.errors import StoreError

_NEUTRAL: Final[Mapping[str, tuple[float, ...]]] = {
    "top_p": (1.0,),
    "top_k": (-1.0, 0.0),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
"""Values that leave the distribution as it is."""
_ELSEWHERE: Final = frozenset({
    "temperature", "max_new_tokens", "max_tokens", "stop", "stop_token_ids", "stop_regex", "no_stop_trim",
    "include_stop_str_in_output", "ignore_eos", "sampling_seed", "seed", "n", "skip_special_tokens",
    "spaces_between_special_tokens", "detokenize", "logprobs", "stream_interval",
})  # fmt: skip
"""Parameters that say when to stop, at which seed to sample or what to return, and shape no distribution."""
_COLDEST: Final = 0.01
"""Engines sample lower temperatures greedily, or raise them."""
_SHOWN: Final = 60


def call_temperature(call: DispatchedSamplingTask) -> float:
    """Return the temperature that ``call`` was sampled with, 1 where its document names none.

    Greedy calls have 0. Raises StoreError for anything that is not a number from 0 on.
    """
    value = call.sampling_params.get("temperature", 1.0)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None:
        return 1.0
    if not is_number or not math.isfinite(value) or value < 0:
        raise StoreError(f"call {call.id} was sampled at temperature {_shown(value)}")
    return float(value)


def shaped_by(call: DispatchedSamplingTask) -> str | None:
    """Return the parameter that ``call`` was shaped by, with its value; None for softmax(logits/temperature).

    An engine that reports the logprobs of softmax(logits/temperature) sampled such a call from something
    else: a truncated, penalised, constrained or greedy distribution. Parameters that are not known here
    count as shaping, unless they are empty.
    """
    if (temperature := call_temperature(call)) < _COLDEST:
        return f"temperature {temperature:g}"
    for name, value in call.sampling_params.items():
        if name in _ELSEWHERE or not value or value in _NEUTRAL.get(name, ()):
            continue
        return f"{name} {_shown(value)}"
    return None


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
