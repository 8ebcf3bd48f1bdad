"""``--preferred_sampling_params``: what a run samples with, and whether it can train with that."""

from __future__ import annotations

import json
from typing import Any

from agentrl.config.fields import require
from agentrl.documents.sampling import COLDEST, logprobs_of, shaping
from agentrl.errors import ConfigError


def parameters(text: str) -> dict[str, Any]:
    """The parameters by name, with those of ``extra`` among them; ConfigError for what is no JSON object."""
    try:
        given = json.loads(text or "{}")
        return {**{name: value for name, value in given.items() if name != "extra"}, **given.get("extra", {})}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--preferred_sampling_params is {text!r}: {error}",
            cure="give JSON, e.g. '{\"temperature\": 1}'",
        ) from error


def temperature(text: str) -> float:
    """The temperature: 1 where none is named; ConfigError for anything that is no number."""
    value = parameters(text).get("temperature", 1.0)
    require(
        isinstance(value, (int, float)),
        f"--preferred_sampling_params has the temperature {value!r}",
        "give a number, e.g. '{\"temperature\": 1}'",
    )
    return float(value)


def require_known_distribution(text: str, engine: str) -> None:
    """Refuse parameters with which every call would be kept out of training. Raises ConfigError.

    The trainer divides by the engine's logprobs: they must be of the distribution that was sampled from.
    """
    coldest = temperature(text)
    require(
        coldest >= COLDEST,
        f"--preferred_sampling_params has temperature {coldest:g}: below {COLDEST:g} engines sample greedily,"
        " and greedy calls cannot be trained",
        "raise it, e.g. to 1; `agentrl eval` may sample at any temperature",
    )
    given = parameters(text)
    names = shaping(given)
    named = ", ".join(f"{name} {given[name]}" for name in names)
    require(
        not names or logprobs_of(engine, given) == "sampled",
        f"--preferred_sampling_params has {named}, and the logprobs of --engine {engine} are then not of the"
        " distribution that is sampled from: no call could be trained",
        f"leave {' and '.join(names)} out; or use an engine that returns them, --engine local or vllm, with"
        " the same flags for every process; `agentrl eval` may sample with them",
    )
