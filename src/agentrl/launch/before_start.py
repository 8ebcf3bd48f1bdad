"""Complete and check a run's flags before any of its processes starts: limits, memory, who runs already."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.chat.model_folder import model_context_length
from agentrl.cli.gpus import MemoryCheck, StepTooLargeError
from agentrl.cli.placement import Placement
from agentrl.config.agreement import AgreedSettings, require_trainable, sampler_settings, trainer_settings
from agentrl.config.arguments import flag_words
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AgentConfig,
    EngineConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from agentrl.errors import (
    ConfigError,
    DependencyKind,
    LeaseHeldError,
    ModelError,
    RunMissingError,
    StoreUnavailableError,
)
from agentrl.launch.processes import environment_of_children

if TYPE_CHECKING:
    from agentrl.store.client import Store

LONGEST_OUTPUT = 32768
_SHORTEST = 2048
"""Shortest context that ``--fit_context`` tries."""
_TURN = 256
"""Fewest tokens of context that a turn is expected to take."""
_MASK_BYTES = 16
"""Memory of a machine without GPUs for each pair of tokens: a dense float32 mask may take a quarter of it."""


def fit(
    configs: Configs,
    flags: Sequence[str],
    placement: Placement | None,
    machines: int,
    report: Callable[[str], None],
    *,
    is_training: bool,
) -> list[str]:
    """Return ``flags`` with the limits of ``--fit_context``, halved until a training step fits the GPUs.

    Raises ConfigError for limits that contradict one another, and for a model that does not fit.
    """
    model = configs[ModelConfig].model_name_or_path
    longest = configs[PlacementConfig].fit_context if model is not None else None
    if longest is not None and placement is None:  # the attention mask has to fit the memory of this machine
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        longest = min(longest, math.isqrt(memory // _MASK_BYTES))
    while True:
        limits = fitted_limits(configs, model, longest) if model is not None and longest is not None else {}
        words = flag_words(limits)
        fitted = configs.with_flags(limits)
        if is_training:
            require_trainable(fitted)
        try:
            if placement is not None and model is not None:
                MemoryCheck(
                    configs=fitted, flags=[*words, *flags], model=model, machines=machines, report=report
                ).check(placement, environment_of_children())
        except StepTooLargeError as error:
            total = fitted[AgentConfig].max_prompt_tokens + fitted[SamplingConfig].max_new_tokens
            if len({"max_prompt_tokens", "max_new_tokens"} & limits.keys()) == 0 or total < 2 * _SHORTEST:
                raise
            longest = total // 2
            report(f"{error.message}: trying a context of {longest} tokens")
            continue
        if words:
            report(f"limits: {' '.join(words)}")
        return [*words, *flags]


def fitted_limits(configs: Configs, model: str, longest: int) -> dict[str, int]:
    """Return the limits that were not given, by flag.

    Prompt and output together take ``longest`` tokens, the model's context or a given ``--max_tokens``,
    whichever is least; a given limit of one changes the other. Raises ConfigError if a given limit leaves
    nothing for the other.
    """
    agent, sampling, train = configs[AgentConfig], configs[SamplingConfig], configs[TrainConfig]
    given = configs.given
    own = configs[ModelConfig].max_model_len or model_context_length(model)
    total = min(longest, own or longest, *([train.max_tokens] if "max_tokens" in given else []))
    prompt, output = agent.max_prompt_tokens, sampling.max_new_tokens
    if not {"max_prompt_tokens", "max_new_tokens"} <= given:
        for name, value in (("max_prompt_tokens", prompt), ("max_new_tokens", output)):
            if name in given and value >= total:
                raise ConfigError(
                    f"--{name} is {value}, and prompt and output have {total} tokens together",
                    hint=f"lower it; the model's context is {own or 'unknown'}, and --max_tokens and"
                    " --fit_context limit both",
                )
        if "max_new_tokens" not in given:
            left = total - prompt if "max_prompt_tokens" in given else max(1, total // 4)
            output = min(LONGEST_OUTPUT, left)
        if "max_prompt_tokens" not in given:
            prompt = total - output
    limits = {
        "max_prompt_tokens": prompt,
        "max_new_tokens": output,
        "max_tokens": prompt + output,
        "prompt_reserve_tokens": min(agent.prompt_reserve_tokens, prompt // 8),
    }
    turns = configs[PlacementConfig].fit_turns
    if turns is not None:
        limits["max_turns"] = min(turns, max(1, prompt // _TURN))
    return {name: value for name, value in limits.items() if name not in given}


def require_usable(configs: Configs, roles: Collection[str]) -> AgreedSettings:
    """Check what needs no database, and return the settings that the processes of ``roles`` agree on.

    Raises ModelError for a folder without a model, and ConfigError for an unknown extension or loss.
    """
    from agentrl.losses.settings import LossSettings, check_loss
    from agentrl.rollout.setup import require_extensions
    from agentrl.weights.folder import require_folder

    if set(roles) - {"serve"}:  # an engine serves a folder without a tokenizer
        require_folder(configs[ModelConfig])
    agreed: AgreedSettings = {}
    if "sample" in roles:
        require_extensions(configs)
        agreed |= sampler_settings(configs)
    if "train" in roles:
        check_loss(configs)
        agreed |= trainer_settings(configs, LossSettings.of_run(configs))
    return agreed


def require_teacher(teacher: str, columns: Collection[str]) -> None:
    """Check ``--teacher`` before its process starts, and that trajectories wait for it (``--columns``).

    Raises ModelError for a folder that is not here, ConfigError for a teacher without its column.
    """
    if "://" not in teacher and not Path(teacher).is_dir():
        raise ModelError(
            f"--teacher is {teacher}, which is not a folder",
            hint="give the folder of a model, or the URL of an SGLang or vLLM server",
        )
    if DependencyKind.TEACHER not in columns:
        raise ConfigError(
            f"--teacher is {teacher}, and --columns is {','.join(columns) or 'empty'}: no trajectory would"
            " wait for it",
            hint="--recipe opd; or --columns teacher, with --loss_calculater OPD or --distill_coef",
        )


async def require_joinable(configs: Configs, roles: Collection[str], agreed: AgreedSettings) -> None:
    """Check that the run, if it has begun, has no live trainer and the settings ``agreed``. Writes nothing.

    Raises LeaseHeldError if ``roles`` has a trainer and one is alive, and ConfigError for other settings.
    """
    from agentrl.observe.begin_run import check_run
    from agentrl.store.client import open_existing
    from agentrl.train.lease import require_no_trainer

    run = configs[RunConfig]
    try:
        store = await open_existing(run)
    except (RunMissingError, StoreUnavailableError):  # the processes wait for the database themselves
        return
    async with store:
        await check_run(store, configs, agreed, configs[ModelConfig].model_name_or_path)
        if "train" not in roles:
            return
        try:
            await require_no_trainer(store)
        except LeaseHeldError as error:
            raise await _explained(store, configs, error) from error


async def _explained(store: Store, configs: Configs, error: LeaseHeldError) -> LeaseHeldError:
    """Return the error with what runs where, how to add a sampler, and how to stop the run."""
    run = configs[RunConfig].run_name
    alive = await store.services.liveness("train", configs[EngineConfig].alive_seconds)
    trainer = await store.trainer_lease.read()
    running = [
        *(f"engine at {engine.url} (process {engine.pid} on {engine.host})" for engine in alive.live_engines),
        *(f"sampler {owner} ({slots} trajectories)" for owner, slots in sorted(alive.claims.items())),
    ]
    return LeaseHeldError(
        "\n  ".join([f"run {run!r} is running already; nothing is started: {error.message}", *running]),
        hint=f"`agentrl status {run}` shows it; to add a sampler: the same command with the environment"
        f" variables ROLES=sample SAMPLERS=1; to stop the run: Ctrl-C where it was started, or `kill"
        f" {trainer.pid}` on {trainer.host}; if the trainer is dead, wait until its lease expires",
    )
