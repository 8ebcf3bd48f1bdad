"""Sampling parameters of a model call, and which distribution an engine's logprobs belong to."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from agentrl.errors import ConfigError

LogprobsOf = Literal["policy", "sampled", "other"]
"""Which distribution logprobs belong to.

``policy``: log_softmax(logits / T), before penalties and truncation; of logits alone where T is 0.
``sampled``: the distribution that the token was drawn from.
``other``: neither of them.
"""

COLDEST = 0.01
"""Lowest temperature that every engine samples at: 0 is greedy, and vLLM raises lower ones to this."""

_TRUNCATING = frozenset({"top_k", "top_p", "min_p"})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
"""Values that do not change the distribution."""
_ELSEWHERE = frozenset({
    "max_new_tokens", "max_tokens", "stop", "stop_token_ids", "stop_regex", "no_stop_trim",
    "include_stop_str_in_output", "ignore_eos", "sampling_seed", "seed", "n", "skip_special_tokens",
    "spaces_between_special_tokens", "detokenize", "logprobs", "stream_interval",
})  # fmt: skip
"""Parameters that do not change the distribution: stops, seeds, output format."""

_SEED = "sampling_seed"
_LIMITS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("max_new_tokens", 1, 2**31 - 1),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 2.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one generation. ``extra`` goes to the engine as it is (``sampling_seed``, ``regex``, …).

    The defaults sample from the policy itself, softmax(logits / temperature); ``top_p``, ``top_k``, ``min_p``
    and penalties change that distribution. ``logprobs_of`` says which one an engine's logprobs belong to.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 8196
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low, high in _LIMITS:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"sampling parameter {name} is {value}; it must lie in [{low}, {high}]")
        if self.top_p == 0.0:
            raise ConfigError("sampling parameter top_p is 0; it must be above 0")
        if self.top_k == 0 or self.top_k < -1:
            raise ConfigError(f"sampling parameter top_k is {self.top_k}; it must be -1 (all) or at least 1")

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read ``--preferred_sampling_params``. Raises ConfigError for unknown names and wrong types."""
        try:
            values = json.loads(text or "{}")
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"--preferred_sampling_params is not JSON ({error}): {text!r}",
                hint="give JSON, e.g. '{\"temperature\": 1}'",
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"--preferred_sampling_params is not a JSON object, but {type(values).__name__}: {text!r}"
            )
        known = {item.name: item for item in dataclasses.fields(cls)}
        return cls(**{name: _typed(name, value, known) for name, value in values.items()})

    def replace(self, **changes: Any) -> Self:
        """A copy with ``changes``."""
        return dataclasses.replace(self, **changes)

    def seeded(self, *key: object) -> Self:
        """A copy whose ``sampling_seed`` follows from ``key``; one that is given already stays.

        Equal keys give equal seeds, on every machine.
        """
        if _SEED in self.extra:
            return self
        digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=4).digest()
        return self.replace(extra={**self.extra, _SEED: int.from_bytes(digest) >> 1})

    def to_request(self) -> dict[str, Any]:
        """The parameters as the engine's JSON."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        extra = values.pop("extra")
        return {**values, "stop_token_ids": list(self.stop_token_ids), **extra}


def distribution_params(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the parameters that change the distribution from softmax(logits / T).

    ``params`` are a call's as its engine got them (``DispatchedSamplingTask.sampling_params``). A temperature
    below ``COLDEST`` is one of them; so is any parameter that is not known here, unless it is empty.
    """
    return tuple(name for name in sorted(params) if _shapes(name, params[name]))


def logprobs_of(engine: str, params: Mapping[str, Any]) -> LogprobsOf:
    """Return which distribution the logprobs of ``engine`` belong to (``local``, ``sglang``, ``vllm``).

    At temperature 0 each takes the likeliest token and returns logprobs as at temperature 1; those of vLLM
    are truncated only where another request of the batch is sampled.
    """
    shaped = frozenset(distribution_params(params))
    if "temperature" in shaped:
        harmless = frozenset[str]() if engine == "vllm" else _TRUNCATING
        is_greedy = params["temperature"] == 0
        return "policy" if is_greedy and shaped <= harmless | {"temperature"} else "other"
    if not shaped:
        return "policy"
    return "sampled" if engine != "sglang" else _of_sglang(params, shaped)


def _of_sglang(params: Mapping[str, Any], shaped: frozenset[str]) -> LogprobsOf:
    """SGLang penalizes the logits before the softmax, and truncates after it, without renormalizing.

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


def _typed(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"unknown sampling parameter {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else 'put what only the engine knows under "extra"',
        )
    kind = known[name].type
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if name == "stop_token_ids" and isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    if name == "extra" and isinstance(value, dict):
        return value
    raise ConfigError(f"sampling parameter {name} has a value of a wrong type: {value!r}")
