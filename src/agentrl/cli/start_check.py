"""Refuse to start processes that could not join their run, before any of them is started."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from agentrl.config.agreed_settings import AgreedSettings, sampler_settings, trainer_settings
from agentrl.config.load import Configs
from agentrl.config.schema import EngineConfig, LossConfig, ModelConfig, RunConfig
from agentrl.errors import LeaseHeldError, RunMissingError, StoreUnavailableError

if TYPE_CHECKING:
    from agentrl.store.client import Store

_SPLIT = "train"


def require_usable(configs: Configs, roles: Collection[str]) -> AgreedSettings:
    """Check what needs no database, and return the settings that the processes of ``roles`` agree on.

    Raises ModelError for a folder without a model, and ConfigError for an unknown extension or loss.
    """
    from agentrl.losses.settings import LossSettings
    from agentrl.rollout.setup import require_extensions
    from agentrl.weights.folder import require_folder

    if set(roles) - {"serve"}:  # an engine serves a folder without a tokenizer
        require_folder(configs[ModelConfig])
    agreed: AgreedSettings = {}
    if "sample" in roles:
        require_extensions(configs)
        agreed |= sampler_settings(configs)
    if "train" in roles:
        agreed |= trainer_settings(configs, LossSettings.of(configs[LossConfig]))
    return agreed


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
    alive = await store.services.liveness(_SPLIT, configs[EngineConfig].alive_seconds)
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
