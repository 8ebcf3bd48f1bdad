"""Check flags against each other at start, and collect what the processes of a run must agree on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from agentrl import __version__
from agentrl.config.flags import require
from agentrl.config.load import Configs
from agentrl.config.schema import (
    GROUPS,
    AdapterConfig,
    AgentConfig,
    CriticConfig,
    EngineConfig,
    GroupConfig,
    LossConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.config.training import VERSION_LOGPROBS
from agentrl.documents.sampling import COLDEST, SamplingParams

AgreedSettings = dict[str, dict[str, Any]]
"""Concern → setting → value."""

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "tokenizers", "pymongo", "mcp")
_SAMPLED = ("tool_call_parser", "agent_name", "system_prompt", "query_prompt", "new_context")
_OF_CRITIC = ("critic", "critic_head", "gamma", "gae_lambda", "gae_over", "value_clip")
_ARCHITECTURE = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "intermediate_size",
)  # fmt: skip


def sampler_settings(configs: Configs) -> AgreedSettings:
    """Return the settings of sampling: group size, order, prompts, and how groups become advantages."""
    agent = configs[AgentConfig]
    sampled = SamplingParams.from_json(configs[SamplingConfig].preferred_sampling_params)
    return {
        "tasks": {"num_generations": configs[TaskConfig].num_generations},
        "temperature": {"temperature": sampled.temperature},
        "sampling": {
            **{name: getattr(agent, name) for name in _SAMPLED},
            "seed": configs[RunConfig].seed,
            "shuffle_tasks": configs[TaskConfig].shuffle_tasks,
            "task_selection": configs[TaskConfig].task_selection,
        },
        "groups": dataclasses.asdict(configs[GroupConfig]),
    }


def trainer_settings(configs: Configs, loss: LossConfig) -> AgreedSettings:
    """Return the settings of training: the loss, with its defaults filled in, the adapters, the critic.

    With a critic also how scores become advantages, which are its rewards: samplers must have the same.
    """
    critic = configs[CriticConfig]
    return {
        **engine_settings(configs),
        **({"groups": dataclasses.asdict(configs[GroupConfig])} if critic.is_on else {}),
        "critic": {name: getattr(critic, name) for name in _OF_CRITIC},
        "loss": {**dataclasses.asdict(loss), "advantage_whitening": configs[TrainConfig].advantage_whitening},
        "adapter": dataclasses.asdict(configs[AdapterConfig]),
    }


def engine_settings(configs: Configs) -> AgreedSettings:
    """Return what the trainer must know of the engines: the correction of its loss depends on it."""
    return {"rollouts": {"rollout_quantization": configs[EngineConfig].rollout_quantization}}


def model_settings(folder: Path) -> dict[str, Any]:
    """Return the shape of a model and the hash of its tokenizer, as far as the folder has them."""
    settings: dict[str, Any] = {}
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings = {name: content[name] for name in _ARCHITECTURE if content.get(name) is not None}
        tokenizer = (folder / "tokenizer.json").read_bytes()
        settings["tokenizer"] = f"sha256 {hashlib.sha256(tokenizer).hexdigest()[:16]}"
    except (OSError, ValueError, AttributeError):
        return settings
    return settings


def public_flags(configs: Configs) -> dict[str, Any]:
    """Return every flag by name, except secret ones."""
    return {
        item.name: getattr(group, item.name)
        for group in configs
        for item in dataclasses.fields(group)
        if item.repr
    }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that results depend on."""
    found = {"python": platform.python_version(), "agentrl": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def per_process_flags() -> frozenset[str]:
    """Return the names of the flags in which the processes of a run may differ without a warning."""
    groups: tuple[Any, ...] = GROUPS
    return frozenset(
        item.name
        for group in groups
        for item in dataclasses.fields(group)
        if group.is_per_process or item.metadata["per_process"]
    )


def require_trainable(configs: Configs) -> None:
    """Raise ConfigError for flags with which no group could be trained, or no step could begin.

    Samplers and the trainer of a run get the same flags, so both call this.
    """
    _require_progress(configs[SamplingConfig], configs[TrainConfig])
    _require_whitening(configs[GroupConfig], configs[TrainConfig])
    _require_warm(configs[SamplingConfig])
    if configs[CriticConfig].is_on:
        require_rewards(configs)
    if configs[LossConfig].old_logprobs == "version":
        require_versions(configs)


def require_versions(configs: Configs) -> None:
    """Raise ConfigError for flags with which ``--old_logprobs version`` cannot work."""
    columns, training = configs[GroupConfig].columns, configs[TrainConfig]
    require(
        VERSION_LOGPROBS in configs[GroupConfig].column_names,
        f"--old_logprobs version reads the column {VERSION_LOGPROBS}, and --columns is {columns!r}",
        f"set --columns {','.join(filter(None, (columns, VERSION_LOGPROBS)))} for samplers and the trainer,"
        " and run agentrl teach --self (docs/off_policy.md)",
    )
    # Not adapters: the trainer adds their product to the base's, and a version may hold the merged weights.
    require(
        configs[AdapterConfig].lora_rank == 0,
        f"--old_logprobs version with --lora_rank {configs[AdapterConfig].lora_rank}: agentrl teach --self"
        " computes whole weights alone",
        "use --old_logprobs recompute, or train whole weights",
    )
    require(
        training.weight_sync == "disk",
        f"--old_logprobs version with --weight_sync {training.weight_sync}: versions that are in the"
        " trainer's memory alone cannot be computed later",
        "set --weight_sync disk, or use --old_logprobs recompute",
    )


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


def require_rewards(configs: Configs) -> None:
    """Raise ConfigError for flags with which stored advantages are not the rewards that a critic learns.

    Trajectories without a reward, and groups of equal scores, teach it as much as others.
    """
    groups, critic = configs[GroupConfig], configs[CriticConfig].critic
    for name, needed, why in (
        ("advantage", "reward", "it learns the rewards, and takes its own values for the baseline"),
        ("drop_zero_advantage", False, "it would never see a reward of 0"),
        ("minimal_advantage", 0.0, "it would not see small rewards"),
        ("min_score_spread", 0.0, "it would not see the tasks that always or never succeed"),
        ("clamp_advantage_by_score", False, "it would see other rewards than those of the scores"),
        ("balance_sample", False, "it would see as many failures as successes, whatever the policy's are"),
        ("baseline", "none", "it takes its own values for the baseline"),
        ("turn_discount", 0.0, "it discounts by --gamma, and these rewards would be sums already"),
    ):
        value = getattr(groups, name)
        require(
            (value or 0.0) == needed if isinstance(needed, float) else value == needed,
            f"--critic {critic} with --{name} {_shown(value)}: {why}",
            f"set --{name} {_shown(needed)} for samplers and the trainer; --recipe ppo has all of them",
        )
    require(
        configs[TrainConfig].staleness_policy != "decay",
        f"--critic {critic} with --staleness_policy decay: it would make rewards smaller, not advantages",
        "use keep, mask or drop",
    )
    require(
        configs[TrainConfig].verify_data,
        f"--critic {critic} with --verify_data false: groups whose scorer rewards roles would be trained, and"
        " one critic cannot tell the rewards of roles apart",
        "leave out --verify_data",
    )


def _shown(value: Any) -> str:
    """Return a flag's value as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _require_warm(sampling: SamplingConfig) -> None:
    """Refuse a temperature at which engines do not sample."""
    params = SamplingParams.from_json(sampling.preferred_sampling_params)
    require(
        params.temperature >= COLDEST,
        f"--preferred_sampling_params has temperature {params.temperature:g}: below {COLDEST:g} engines"
        " sample greedily, and greedy calls cannot be trained",
        "raise it, e.g. to 1; `agentrl eval` may sample at any temperature",
    )
