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

COLDEST = 0.01
"""Lower temperatures are not sampled alike everywhere: greedily at 0, and vLLM raises them to this."""

_TRUNCATING = frozenset({"top_k", "top_p", "min_p"})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
"""Values that leave the distribution as it is."""
_ELSEWHERE = frozenset({
    "max_new_tokens", "max_tokens", "stop", "stop_token_ids", "stop_regex", "no_stop_trim",
    "include_stop_str_in_output", "ignore_eos", "sampling_seed", "seed", "n", "skip_special_tokens",
    "spaces_between_special_tokens", "detokenize", "logprobs", "stream_interval",
})  # fmt: skip
"""Parameters that say where to stop, at which seed to sample or what to return."""


def shaping(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters, by name, with which a call samples from something else than softmax(logits / T).

    ``params`` are a call's as its engine got them (``DispatchedSamplingTask.sampling_params``). A temperature
    below ``COLDEST`` is one of them; so is any parameter that is not known here, unless it is empty.
    """
    return tuple(name for name in sorted(params) if _shapes(name, params[name]))


def logprobs_of(engine: str, params: Mapping[str, Any]) -> LogprobsOf:
    """What the logprobs are of that ``engine`` (``local``, ``sglang``, ``vllm``) returns for ``params``.

    At temperature 0 each takes the likeliest token and returns logprobs as at temperature 1; those of vLLM
    are truncated only where another request of the batch is sampled.
    """
    shaped = frozenset(shaping(params))
    if "temperature" in shaped:
        harmless = frozenset[str]() if engine == "vllm" else _TRUNCATING
        is_greedy = params["temperature"] == 0
        return "policy" if is_greedy and shaped <= harmless | {"temperature"} else "other"
    if not shaped:
        return "policy"
    return "sampled" if engine != "sglang" else _of_sglang(params, shaped)


def _of_sglang(params: Mapping[str, Any], shaped: frozenset[str]) -> LogprobsOf:
    """SGLang penalises the logits before the softmax, and truncates after it, without renormalising.

    ``top_k`` 1 is greedy there: the temperature counts only where another request of the batch is not.
    """
    if not shaped & _TRUNCATING:
        return "sampled"
    is_greedy = params.get("top_k") == 1 and params.get("temperature", 1.0) != 1.0
    return "policy" if shaped <= _TRUNCATING and not is_greedy else "other"


def _shapes(name: str, value: Any) -> bool:
    if name == "temperature":
        return value is not None and bool(value < COLDEST)
    return bool(value) and name not in _ELSEWHERE and value not in _NEUTRAL.get(name, ())
