"""Prepare a run on this machine: complete and check its flags, place its processes, start its database."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.agreement import AgreedSettings, sampler_settings, trainer_settings
from agentrl.config.arguments import flag_words
from agentrl.config.load import Configs
from agentrl.config.schema import (
    EngineConfig,
    EvaluationConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    TaskConfig,
    TeacherConfig,
)
from agentrl.errors import (
    ConfigError,
    DependencyKind,
    LeaseHeldError,
    ModelError,
    RunMissingError,
    StoreUnavailableError,
)
from agentrl.launch.demo import SERVERS_FILE, default_servers, demo_model
from agentrl.launch.memory import fit
from agentrl.launch.placement import Placement, place_processes
from agentrl.launch.processes import RunPlan, agentrl_command
from agentrl.launch.recipe import TASK_FILES, AccelerateConfig, read_accelerate_config, read_recipe
from agentrl.losses.settings import LossSettings, check_loss
from agentrl.observe.begin_run import check_run
from agentrl.registry import import_modules
from agentrl.rollout.setup import require_extensions
from agentrl.store.client import Store, open_existing
from agentrl.store.embedded.server import EmbeddedMongo
from agentrl.train.lease import require_no_trainer
from agentrl.weights.folder import require_folder

ROLES = ("serve", "sample", "train")


def prepare(command: str, flags: Sequence[str], configs: Configs, variables: Mapping[str, str]) -> RunPlan:
    """Return what to start: everything is checked, the model is made, and the database runs.

    ``command`` is ``train`` or ``eval``, ``configs`` are the parsed ``flags``, ``variables`` the environment.
    """
    flags, configs = _with(read_recipe(configs, TASK_FILES[command]), flags, configs)
    run, is_training = configs[RunConfig], command == "train"

    def report(text: str) -> None:
        print(f"{run.run_name}: {text}", flush=True)

    roles = _roles(command, configs, variables)
    if command == "eval" and "serve" in roles:
        flags = ["--eval_engine", "shared", *flags]
    accelerate = read_accelerate_config(variables.get("ACCELERATE_CONFIG") if "train" in roles else None)
    configs = configs.with_flags(accelerate.sizes)
    if "train" in roles:  # before the demo's model is fetched
        import_modules(configs[TaskConfig].imported_modules)
        check_loss(configs)

    is_demo = configs[ModelConfig].model_name_or_path is None
    servers = default_servers(configs, is_demo=is_demo) if roles & {"sample", "eval"} else None
    if servers is not None:
        flags = ["--mcp_servers_file", str(SERVERS_FILE), *flags]
    if is_demo:
        flags, configs = _with({"model_name_or_path": str(demo_model())}, flags, configs)

    agreed = require_usable(configs, roles)
    columns = configs[GroupConfig].column_names
    teacher = configs[TeacherConfig].teacher if "sample" in roles else None
    if teacher is not None:
        require_teacher(teacher, columns)
    elif is_training and columns and configs[TeacherConfig].teacher is None:
        report(f"groups wait for {', '.join(columns)}, and no --teacher is given: start agentrl teach too")
    mongo = EmbeddedMongo(run.mongo_dir)
    has_database = run.db_connection_string is not None or mongo.status().running
    if has_database:
        asyncio.run(require_joinable(configs, roles, agreed))
    placement = place_processes(
        configs, report, trains="train" in roles and not accelerate.uses_cpu, serves="serve" in roles,
        machines=accelerate.machines,
    )  # fmt: skip
    flags = fit(configs, flags, placement, accelerate.machines, report, is_training=is_training)
    if not has_database:
        mongo.up()
        report(f"MongoDB started (data in {run.mongo_dir}); stop it with: agentrl mongo down")
        asyncio.run(require_joinable(configs, roles, agreed))

    return RunPlan(
        name=run.run_name,
        logs=Path(run.log_dir),
        flags=flags,
        engines=len(placement.engines) if placement is not None else int("serve" in roles),
        port=configs[EngineConfig].port,
        samplers=int(variables.get("SAMPLERS") or "2") if "sample" in roles else 0,
        main=_main_command(command, flags, accelerate, placement) if command in roles else None,
        follows=is_training and configs[EvaluationConfig].eval_steps is not None,
        teaches=teacher is not None,
        has_demo_tools=servers is not None,
        inf_mem_ratio=configs[EngineConfig].inf_mem_ratio,
        placement=placement,
    )


def _with(values: Mapping[str, Any], flags: Sequence[str], configs: Configs) -> tuple[Sequence[str], Configs]:
    """Return the flags as words and parsed, with ``values``, none of which was given."""
    return [*flag_words(values), *flags], configs.with_flags(values)


def _roles(command: str, configs: Configs, variables: Mapping[str, str]) -> set[str]:
    """Return the kinds of processes that run here. Raises ConfigError for an unknown one in ``ROLES``."""
    if command == "eval":
        has_own = configs.given & {"eval_engine", "eval_model"}
        return {"eval"} if has_own else {"serve", "eval"}
    roles = set((variables.get("ROLES") or " ".join(ROLES)).split())
    unknown = sorted(roles - set(ROLES))
    if unknown:
        raise ConfigError(f"ROLES names {', '.join(unknown)}", hint=f"choose among: {', '.join(ROLES)}")
    return roles


def _main_command(
    command: str, flags: Sequence[str], accelerate: AccelerateConfig, placement: Placement | None
) -> list[str]:
    """Return the command of the evaluation, or of the trainer with a process for each of its GPUs."""
    processes = len(placement.trainer) if placement is not None else 0
    if placement is not None and placement.is_colocated:
        flags = [*flags, "--colocate", "true"]
    module = ["-m", "agentrl.train", *flags]
    if command == "train" and accelerate.path is not None:
        program = [str(Path(sys.executable).with_name("accelerate")), "launch"]
        count = ["--num_processes", str(processes * accelerate.machines)] if processes else []
        return [*program, "--config_file", accelerate.path, *count, *module]
    if command == "train" and processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*launcher, "--nproc_per_node", str(processes), *module]
    return agentrl_command(command, flags)


def require_usable(configs: Configs, roles: Collection[str]) -> AgreedSettings:
    """Check what needs no database, and return the settings that the processes of ``roles`` agree on.

    Raises ModelError for a folder without a model, and ConfigError for an unknown extension or loss.
    """
    if set(roles) - {"serve"}:  # an engine serves a folder without a tokenizer
        require_folder(configs[ModelConfig])
    agreed: AgreedSettings = {}
    if "sample" in roles:
        require_extensions(configs)
        agreed |= sampler_settings(configs)
    if "train" in roles:
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
