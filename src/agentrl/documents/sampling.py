"""Sampling parameters of a model call, and the distribution that an engine's logprobs belong to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from agentrl.base.validation import Number, SettingsModel, Whole, check
from agentrl.errors import ConfigError

LogprobsOf = Literal["policy", "sampled", "truncated", "other"]
"""The distribution that logprobs belong to.

``policy``: log_softmax(logits / T), before penalties and truncation; log_softmax(logits) if T is 0.
``sampled``: the distribution that the token was sampled from.
``truncated``: the same, and the call stores the ids that top-p, top-k and min-p kept (``sampling_mask``).
``other``: neither.
"""

COLDEST = 0.01
"""Lowest temperature that every engine supports: 0 is greedy, and vLLM raises lower values to this one."""

_TRUNCATING = frozenset({"top_k", "top_p", "min_p"})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
"""Values of parameters that leave the distribution unchanged."""
_NO_EFFECT = frozenset({
    "max_new_tokens", "max_tokens", "stop", "stop_token_ids", "stop_regex", "no_stop_trim",
    "include_stop_str_in_output", "ignore_eos", "sampling_seed", "seed", "n", "skip_special_tokens",
    "spaces_between_special_tokens", "detokenize", "logprobs", "stream_interval",
})  # fmt: skip
"""Parameters that never change the distribution: stop conditions, seeds, output format."""

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
class SamplingParams(SettingsModel):
    """Parameters of one generation. ``extra`` goes to the engine unchanged (``sampling_seed``, ``regex``, …).

    The defaults sample from the policy, softmax(logits / temperature). ``top_p``, ``top_k``, ``min_p`` and
    penalties change the distribution; see ``logprobs_of`` for the effect on logprobs.
    """

    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Whole = -1
    min_p: Number = 0.0
    max_new_tokens: Whole = 8196
    stop_token_ids: tuple[Whole, ...] = ()
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    repetition_penalty: Number = 1.0
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
        """Parse ``--preferred_sampling_params``. Raises ConfigError for unknown names and wrong types."""
        try:
            values = json.loads(text or "{}")
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"--preferred_sampling_params is not JSON ({error}): {text!r}",
                hint="give JSON, e.g. '{\"temperature\": 1}'",
            ) from error
        own = 'parameters of one engine go under "extra"'
        return check(
            cls, values,
            lambda problem: ConfigError(
                f"--preferred_sampling_params: {problem.text}",
                hint=own if problem.hint is None else f"{problem.hint}; {own}",
            ),
        )  # fmt: skip

    @property
    def truncates(self) -> bool:
        """Return whether ``top_p``, ``top_k`` or ``min_p`` excludes ids; a greedy call excludes none."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with ``changes``."""
        return dataclasses.replace(self, **changes) if changes else self

    def seeded(self, *key: object) -> Self:
        """Return a copy with a ``sampling_seed`` derived from ``key``; keep the seed if there is one.

        Equal keys give equal seeds on every machine.
        """
        if _SEED in self.extra:
            return self
        # Take no hash(): Python salts that of texts in each process.
        digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=4).digest()
        # Keep 31 bits: the seed then is not negative as a signed 32-bit number either.
        return self.replace(extra={**self.extra, _SEED: int.from_bytes(digest) >> 1})

    def to_request(self) -> dict[str, Any]:
        """Return the parameters as JSON for the engine."""
        values = {name: getattr(self, name) for name in _NAMES}
        return {**values, "stop_token_ids": list(self.stop_token_ids), **self.extra}


_NAMES = tuple(item.name for item in dataclasses.fields(SamplingParams) if item.name != "extra")


def distribution_params(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the parameters that change the distribution from softmax(logits / T).

    ``params`` are the parameters that the engine received (``DispatchedSamplingTask.sampling_params``). A
    temperature below ``COLDEST`` counts; so does every unknown parameter with a value.
    """
    return tuple(name for name in sorted(params) if _changes_distribution(name, params[name]))


def logprobs_of(engine: str, params: Mapping[str, Any]) -> LogprobsOf:
    """Return the distribution that the logprobs of ``engine`` belong to, if it returns no sampling mask.

    ``engine`` is local, sglang or vllm. At temperature 0 each takes the most likely token and returns
    logprobs as at temperature 1; vLLM truncates them if another request of the batch is sampled.
    """
    changing = frozenset(distribution_params(params))
    if "temperature" in changing:
        harmless = frozenset[str]() if engine == "vllm" else _TRUNCATING
        is_greedy = params["temperature"] == 0
        return "policy" if is_greedy and changing <= harmless | {"temperature"} else "other"
    if not changing:
        return "policy"
    return "sampled" if engine != "sglang" else _sglang_logprobs_of(params, changing)


def _sglang_logprobs_of(params: Mapping[str, Any], changing: frozenset[str]) -> LogprobsOf:
    """Return the distribution for SGLang, which penalizes logits and truncates probabilities.

    It does not renormalize after the truncation. ``top_k`` 1 is greedy: the temperature then has an effect
    only if another request of the batch is sampled.
    """
    if not changing & _TRUNCATING:
        return "sampled"
    is_greedy = params.get("top_k") == 1 and params.get("temperature", 1.0) != 1.0
    return "policy" if changing <= _TRUNCATING and not is_greedy else "other"


def _changes_distribution(name: str, value: Any) -> bool:
    if name == "temperature":
        return value is not None and bool(value < COLDEST)
    return bool(value) and name not in _NO_EFFECT and value not in _NEUTRAL.get(name, ())
