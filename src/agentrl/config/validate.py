"""Check flags against each other at start."""

from __future__ import annotations

from typing import Protocol, TypeVar

from agentrl.config.fields import require
from agentrl.config.schema import (
    AgentConfig,
    EngineConfig,
    GroupConfig,
    SamplingConfig,
    TrainConfig,
)
from agentrl.documents.sampling import COLDEST, SamplingParams, distribution_params, logprobs_of

T = TypeVar("T")


class Groups(Protocol):
    """The parsed groups of flags, by class."""

    def __getitem__(self, cls: type[T]) -> T: ...


def require_trainable(configs: Groups) -> None:
    """Raise ConfigError for flags with which no group could be trained, or no step could begin.

    Samplers and the trainer of a run get the same flags, so both call this.
    """
    _require_progress(configs[SamplingConfig], configs[TrainConfig])
    _require_whitening(configs[GroupConfig], configs[TrainConfig])
    _require_fitting(configs[AgentConfig], configs[SamplingConfig], configs[TrainConfig])
    _require_known_distribution(configs[SamplingConfig], configs[EngineConfig])


def _require_progress(sampling: SamplingConfig, training: TrainConfig) -> None:
    """Refuse synchronous sampling with unpublished steps: samplers would wait for weights without end.

    Between two publications the trainer's weights are unpublished. Admission counts these steps as
    staleness. The trainer publishes early when there are more than ``max_staleness`` of them.
    """
    is_synchronous = sampling.sync_sampling or sampling.max_staleness == 0
    flags = "--sync_sampling" if sampling.sync_sampling else "--max_staleness 0"
    require(
        not is_synchronous or training.publish_steps == 1,
        f"{flags} samples a step's groups only under published weights, and --publish_steps is"
        f" {training.publish_steps}: after step 1 samplers would wait for weights that are not published",
        "set --publish_steps 1; or --max_staleness 1 or more, without --sync_sampling",
    )


def _require_whitening(groups: GroupConfig, training: TrainConfig) -> None:
    """Refuse group flags that whitening undoes: it changes the zero, sign and scale of every advantage."""
    if training.advantage_whitening == "none":
        return
    losing = {
        "drop_zero_advantage": ("false", "whitening moves advantages away from 0"),
        "minimal_advantage": (0.0, "small advantages are part of the step's mean"),
        "clamp_advantage_by_score": ("false", "whitening changes the signs that it sets"),
        "adv_scaling": (1.0, "whitening divides by the scale"),
    }
    if groups.advantage == "reward":
        losing["min_score_spread"] = (0.0, "groups with equal scores are part of the step's mean")
    for name, (needed, why) in losing.items():
        value = getattr(groups, name)
        value = str(value).lower() if isinstance(value, bool) else value
        require(
            value == needed,
            f"--advantage_whitening batch with --{name} {value}: {why}",
            f"set --{name} {needed:g}" if isinstance(needed, float) else f"set --{name} {needed}",
        )


def _require_fitting(agent: AgentConfig, sampling: SamplingConfig, training: TrainConfig) -> None:
    """Refuse model calls that may not fit in a micro-batch: prompt and output are trained in one piece."""
    longest = agent.max_prompt_tokens + sampling.max_new_tokens
    require(
        longest <= training.max_tokens,
        f"a model call may have --max_prompt_tokens {agent.max_prompt_tokens} + --max_new_tokens"
        f" {sampling.max_new_tokens} = {longest} tokens, more than a micro-batch of --max_tokens"
        f" {training.max_tokens}",
        f"set --max_tokens {longest} or more, or lower one of the other two; samplers and the trainer get"
        " the same flags",
    )


def _require_known_distribution(sampling: SamplingConfig, serving: EngineConfig) -> None:
    """Refuse sampling parameters if the engine's logprobs are not of the sampled distribution."""
    params = SamplingParams.from_json(sampling.preferred_sampling_params)
    require(
        params.temperature >= COLDEST,
        f"--preferred_sampling_params has temperature {params.temperature:g}: below {COLDEST:g} engines"
        " sample greedily, and greedy calls cannot be trained",
        "raise it, e.g. to 1; `agentrl eval` may sample at any temperature",
    )
    given, engine = params.to_request(), serving.engine
    names = distribution_params(given)
    named = ", ".join(f"{name} {given[name]}" for name in names)
    require(
        not names or logprobs_of(engine, given) == "sampled",
        f"--preferred_sampling_params has {named}, and the logprobs of --engine {engine} are then not of the"
        " sampled distribution: no call could be trained",
        f"leave {' and '.join(names)} out; or use an engine that returns them, --engine local or vllm, with"
        " the same flags for every process; `agentrl eval` may sample with them",
    )
