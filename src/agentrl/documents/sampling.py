"""Of which distribution a model call sampled, and of which its engine's logprobs are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

LogprobsOf = Literal["policy", "sampled", "other"]
"""What logprobs are of.

``policy``: log_softmax(logits / T), before penalties and truncation; of logits alone where T is 0.
``sampled``: the distribution that the token was drawn from.
``other``: neither of them.
"""

_TRUNCATING = frozenset({"top_k", "top_p", "min_p"})
_NEUTRAL: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_ENDING = frozenset({
    "max_new_tokens", "stop_token_ids", "stop", "stop_regex", "ignore_eos", "no_stop_trim",
    "include_stop_str_in_output", "sampling_seed", "seed", "skip_special_tokens",
    "spaces_between_special_tokens", "stream_interval",
})  # fmt: skip
"""Parameters that decide where a generation ends, how it is shown, and its random numbers."""


def shaping(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters, by name, with which a call samples from something else than softmax(logits / T).

    ``params`` are a call's as its engine got them (``DispatchedSamplingTask.sampling_params``). Temperature 0
    is one of them; a parameter that is not known here is taken for one.
    """
    return tuple(name for name in sorted(params) if _shapes(name, params[name]))


def logprobs_of(engine: str, params: Mapping[str, Any]) -> LogprobsOf:
    """What the logprobs are of that ``engine`` (``local``, ``sglang``, ``vllm``) returns for ``params``.

    At temperature 0 all of them take the likeliest token, and return logprobs as at temperature 1.
    """
    shaped = frozenset(shaping(params))
    if "temperature" in shaped:
        return "policy" if shaped <= _TRUNCATING | {"temperature"} else "other"
    if not shaped:
        return "policy"
    return "sampled" if engine != "sglang" else _of_sglang(params, shaped)


def _of_sglang(params: Mapping[str, Any], shaped: frozenset[str]) -> LogprobsOf:
    """SGLang changes the logits by penalties before the softmax, and truncates after it.

    ``top_k`` 1 is greedy there: the temperature counts only where another request of the batch is not.
    """
    if not shaped & _TRUNCATING:
        return "sampled"
    is_greedy = params.get("top_k") == 1 and params.get("temperature", 1.0) != 1.0
    return "policy" if shaped <= _TRUNCATING and not is_greedy else "other"


def _shapes(name: str, value: Any) -> bool:
    if name == "temperature":
        return bool(value == 0)
    if name in _ENDING or value is None:
        return False
    if name in _NEUTRAL:
        return bool(value != _NEUTRAL[name])
    return bool(value)
