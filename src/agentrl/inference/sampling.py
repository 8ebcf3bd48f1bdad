"""How tokens are to be sampled, as engines name the parameters."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one generation. ``extra`` goes to the engine as it is (``sampling_seed``, ``regex``, …).

    The defaults sample from the policy itself, softmax(logits / temperature); ``top_p``, ``top_k``, ``min_p``
    and penalties make another distribution of it. Of which one an engine's logprobs are, its generations say
    (``logprobs_of``).
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
        """The parameters of ``--preferred_sampling_params``; ConfigError on unknown names and wrong types."""
        try:
            values = json.loads(text or "{}")
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"sampling parameters are not JSON ({error}): {text!r}",
                cure="write, e.g., '{\"temperature\": 1}'",
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"sampling parameters must be a JSON object, not {type(values).__name__}: {text!r}"
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


def _typed(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"unknown sampling parameter {name!r}",
            cure=f"did you mean {near[0]!r}?" if near else 'put what only the engine knows under "extra"',
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
