"""Prepare a run on this machine and start it: its flags, its database, its processes.

A run with ``--recipe`` has limits that fit its model, or the quickstart's tasks and model with theirs.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.base.installation import require, shipped_files
from agentrl.base.processes import (
    Ending,
    StoppedBySignalError,
    SupervisedProcess,
    Supervisor,
    exit_reason,
    free_port,
    half_of_cores,
    run_child,
    thread_limits,
)
from agentrl.base.registry import import_modules
from agentrl.base.validation import read_settings
from agentrl.chat.model_folder import context_length
from agentrl.columns.teacher import read_prompt
from agentrl.config.agreement import AgreedSettings, require_trainable, sampler_settings, trainer_settings
from agentrl.config.flags import flag_words
from agentrl.config.load import Configs, read_recipe
from agentrl.config.run import without_uri
from agentrl.config.schema import (
    AgentConfig,
    ClaimConfig,
    EngineConfig,
    EvaluationConfig,
    GroupConfig,
    LossConfig,
    ModelConfig,
    ParallelConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TeacherConfig,
    ToolConfig,
    TrainConfig,
)
from agentrl.config.training import VERSION_LOGPROBS
from agentrl.documents.run import Doing
from agentrl.documents.status import StepStatus, Work
from agentrl.documents.task_presets import TaskRows
from agentrl.documents.training import require_choice
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    DependencyKind,
    LeaseHeldError,
    ModelError,
    RunMissingError,
    StoreUnavailableError,
    quoted,
)
from agentrl.inference.engines.commands import SHARED_MEMORY, require_engine
from agentrl.local.mongod import EmbeddedMongo
from agentrl.local.placement import GIB, Numbers, Placement, place_processes, ranges
from agentrl.losses.settings import LossSettings, check_loss
from agentrl.observe.begin_run import check_run
from agentrl.observe.progress import seconds_of
from agentrl.observe.trackers import require_trackers
from agentrl.rollout.load_tasks import is_address, read_task_source
from agentrl.rollout.setup import open_format, read_limits, require_extensions
from agentrl.store.client import Store, open_existing
from agentrl.tools.config import McpSpec, load_servers
from agentrl.train.lease import require_no_trainer
from agentrl.weights.folder import require_config, require_folder, require_weights, stored_bytes

_ACCELERATE_SIZES = ("dp_replicate_size", "tp_size", "cp_size")

_FITTED = {"fit_context": 161536, "fit_turns": 200}
"""Limits of a recipe's run with a model and tasks of its own, where the model's context and memory allow."""
_OWN: Mapping[str, Mapping[str, Any]] = {
    "train": {**_FITTED, "activation_checkpointing": "full"},
    "eval": {
        **_FITTED, "new_context": "discard_all",
        "preferred_sampling_params": '{"temperature": 1, "top_p": 1, "presence_penalty": 1.0}',
    },
}  # fmt: skip
DEMO = {"max_turns": 4, "max_prompt_tokens": 2048, "prompt_reserve_tokens": 256, "max_new_tokens": 64}
"""Limits of a recipe's run without them: of the quickstart's model and tasks."""
DEMO_TRAIN = {**DEMO, "max_tokens": 4096}


def limits_of_recipe(command: str, configs: Configs) -> dict[str, Any]:
    """Return the limits, and the demonstration's tasks, that a run with ``--recipe`` was not given.

    ``command`` is ``train`` or ``eval``. Raises ConfigError for a model without tasks, and for tasks without
    a model.
    """
    if configs[RunConfig].recipe is None:
        return {}
    tasks = f"{command}_file"
    model, file = configs[ModelConfig].model_name_or_path, getattr(configs[TaskConfig], tasks)
    for flag, variable, value, other in (
        ("model_name_or_path", "MODEL_PATH", model, file), (tasks, tasks.upper(), file, model),
    ):  # fmt: skip
        if value is None and other is not None:
            raise ConfigError(
                f"{other} is given, and no --{flag}", hint=f"export {variable}=…, or give the flag"
            )
    found = _OWN[command]
    if model is None:
        file = str(shipped_files() / f"tasks/calculator_{command}.jsonl")
        found = {**(DEMO_TRAIN if command == "train" else DEMO), tasks: file}
    return {flag: value for flag, value in found.items() if flag not in configs.given}


@dataclass(frozen=True)
class AccelerateConfig:
    """What ``ACCELERATE_CONFIG`` says about machines and devices."""

    path: str | None = None
    """None: the variable names no file."""
    machines: int = 1
    uses_cpu: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Flags that its ``parallelism_config`` sets, such as ``tp_size``."""


def read_accelerate_config(path: str | None) -> AccelerateConfig:
    """Read the file that ``ACCELERATE_CONFIG`` names. Raises ConfigError if it chooses GPUs itself."""
    if not path:
        return AccelerateConfig()
    file = read_settings(path, what="ACCELERATE_CONFIG", hint="accelerate config writes one")
    content = file.content
    if not isinstance(content, dict):
        raise file.error("the file holds no mapping")
    chosen = str(content.get("gpu_ids") or "all")
    if chosen != "all":
        raise file.error(
            f"gpu_ids is {chosen}, which would replace the GPUs of the placement", "gpu_ids",
            hint=f"remove gpu_ids, and give --train_gpus {chosen}",
        )  # fmt: skip
    uses_cpu = bool(content.get("use_cpu")) or content.get("distributed_type") == "MULTI_CPU"
    parallelism = content.get("parallelism_config") or {}
    found = {name: parallelism.get(f"parallelism_config_{name}") for name in _ACCELERATE_SIZES}
    sizes = {name: int(size) for name, size in found.items() if size}
    return AccelerateConfig(path, int(content.get("num_machines") or 1), uses_cpu, sizes)


LONGEST_OUTPUT = 32768
_SHORTEST = 2048
"""Shortest context that ``--fit_context`` tries."""
_TURN = 256
"""Fewest tokens of context that a turn is expected to take."""
_MASK_BYTES = 16
"""Memory of a machine without GPUs for each pair of tokens: a dense float32 mask may take a quarter of it."""
_PLAN_SECONDS = 60.0
_OWN_SHARE = 0.85
"""Fraction of a GPU's memory that an engine takes by itself; the defaults of SGLang and vLLM are near it."""
_OVERRIDE = "--check_memory false starts it all the same"


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
    model, longest = str(configs[ModelConfig].model_name_or_path), configs[PlacementConfig].fit_context
    if longest is not None and placement is None:  # the attention mask has to fit the memory of this machine
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        longest = min(longest, math.isqrt(memory // _MASK_BYTES))
    while True:
        limits = {} if longest is None else fitted_limits(configs, model, longest)
        words = flag_words(limits)
        fitted = configs.with_flags(limits)
        if is_training:
            require_trainable(fitted)
        try:
            if placement is not None:
                MemoryCheck(
                    configs=fitted, flags=[*words, *flags], model=model, machines=machines, report=report
                ).check(placement, environment_of_children())
        except StepTooLargeError as error:
            total = fitted[AgentConfig].max_prompt_tokens + fitted[SamplingConfig].max_new_tokens
            if not {"max_prompt_tokens", "max_new_tokens"} & limits.keys() or total < 2 * _SHORTEST:
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
    own = context_length(configs[ModelConfig], model)
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


class StepTooLargeError(ConfigError):
    """A training step does not fit the memory of the trainer's GPUs."""


@dataclass(frozen=True, kw_only=True)
class MemoryCheck:
    """Compares the memory that a placement needs with that of its GPUs."""

    configs: Configs
    flags: Sequence[str]
    """The run's flags, which the trainer gets."""
    model: str
    """Folder of the model."""
    machines: int = 1
    """Machines that the trainer runs on, each with as many GPUs as this one."""
    report: Callable[[str], None]

    def check(self, placement: Placement, environment: Mapping[str, str]) -> None:
        """Raise ConfigError if the weights of an engine do not fit, StepTooLargeError if a step does not."""
        if not self.configs[PlacementConfig].check_memory:
            return
        if placement.engines:
            self._check_engines(placement)
        if placement.trainer:
            self._check_trainer(placement, environment)

    def _check_engines(self, placement: Placement) -> None:
        config = self.configs[EngineConfig]
        weights = stored_bytes(Path(self.model)) / GIB
        memory = min(placement.gpus.memory_gib[number] for group in placement.engines for number in group)
        share = config.inf_mem_ratio or (placement.engine_share if placement.shared else _OWN_SHARE)
        limit = memory * share
        if weights / config.inf_tp_size > limit:
            raise ConfigError(
                f"an engine's GPU needs {weights / config.inf_tp_size:.1f} GiB for weights alone, and"
                f" an engine takes {limit:.1f} of {memory:.1f} GiB (--inf_mem_ratio {share:g})",
                hint=f"raise --inf_mem_ratio, or set --inf_tp_size {2 * config.inf_tp_size}; {_OVERRIDE}",
            )

    def _check_trainer(self, placement: Placement, environment: Mapping[str, str]) -> None:
        """Plan a step with a full micro-batch by ``agentrl plan``, in a process of its own."""
        memory = min(placement.gpus.memory_gib[number] for number in placement.trainer)
        if placement.shared and not placement.is_colocated:
            memory *= 1 - (self.configs[EngineConfig].inf_mem_ratio or SHARED_MEMORY)
        gpus = len(placement.trainer) * self.machines
        cluster = ["--gpus", f"{gpus}xH100", "--gpu_memory_gib", f"{memory:.2f}"]
        command = [
            *(sys.executable, "-m", "agentrl", "plan", *self.flags, *cluster, *self._workload()),
            *("--gpus_per_node", str(len(placement.trainer))),
            *("--fitting", "1", "--json"),
        ]
        self.report("agentrl plan computes the memory of a training step, to see whether it fits")
        try:
            done = subprocess.run(
                command, env=without_uri(environment), capture_output=True, text=True, timeout=_PLAN_SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            self.report(f"the trainer's memory is not checked: no answer in {_PLAN_SECONDS:g} s")
            return
        try:
            plan = json.loads(done.stdout)
        except ValueError:
            said = done.stderr.strip().splitlines()
            self.report(f"the trainer's memory is not checked: {said[0] if said else 'no answer'}")
            return
        self._judge(plan, placement, cluster)

    def _judge(self, plan: Mapping[str, Any], placement: Placement, cluster: Sequence[str]) -> None:
        layouts, limit = plan["layouts"], plan["gpus"]["planned_bytes"] / GIB
        fitting = next((each for each in layouts if each["state"] == "fits"), None)
        if fitting is not None:
            peak = fitting["peak_bytes"] / GIB
            self.report(f"a training step needs {peak:.1f} of {limit:.1f} GiB a GPU (agentrl plan)")
            return
        reasons = [each["reason"] for each in (*layouts, *plan["refused"]) if each["reason"]]
        if not reasons:
            self.report("the trainer's memory is not checked: agentrl plan lists no layout")
            return
        raise StepTooLargeError(
            f"the trainer does not fit GPU {ranges(placement.trainer)}: {reasons[0]}",
            hint=f"agentrl plan --model {quoted(self.model)} {' '.join(cluster)} --context"
            f" {self._context()} lists layouts that fit; or more GPUs by --train_gpus; {_OVERRIDE}",
        )

    def _workload(self) -> list[str]:
        """Return the flags of the longest trajectory, and those of the layout, which are not searched."""
        train = self.configs[TrainConfig]
        sizes = {name: getattr(train, name) for name in vars(ParallelConfig()) if name.endswith("_size")}
        values = {"context": self._context(), "max_tokens": train.max_tokens, **sizes}
        named = {"activation_checkpointing", "gradient_checkpointing"} & self.configs.given
        words = [] if named else ["--activation_checkpointing", "none"]
        return [*words, *flag_words(values)]

    def _context(self) -> int:
        """Return the length of the longest trajectory that a call of the model can have."""
        configs = self.configs
        longest = configs[AgentConfig].max_prompt_tokens + configs[SamplingConfig].max_new_tokens
        own = context_length(configs[ModelConfig], self.model)
        return min(longest, configs[TrainConfig].max_tokens, own or longest)


ROLES = ("serve", "sample", "train")


def prepare(command: str, flags: Sequence[str], configs: Configs, variables: Mapping[str, str]) -> RunPlan:
    """Return what to start: everything is checked, the model is made, and the database runs.

    ``command`` is ``train`` or ``eval``, ``configs`` are the parsed ``flags``, ``variables`` the environment.
    """
    flags, configs = _with(limits_of_recipe(command, configs), flags, configs)
    run, is_training = configs[RunConfig], command == "train"

    def report(text: str) -> None:
        print(f"{run.run_name}: {text}", flush=True)

    if run.recipe is not None:
        report(f"recipe {run.recipe}: {read_recipe(run.recipe).source}")
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
        read_prompt(configs[TeacherConfig])
    teaches_self = "train" in roles and configs[LossConfig].old_logprobs == "version"
    unfilled = [name for name in columns if not (teaches_self and name == VERSION_LOGPROBS)]
    if is_training and unfilled and configs[TeacherConfig].teacher is None:
        report(f"groups wait for {', '.join(unfilled)}, and no --teacher is given: start agentrl teach too")
    mongo = EmbeddedMongo(run.mongo_dir)
    has_database = run.db_connection_string is not None or mongo.status().running
    if has_database:
        asyncio.run(require_joinable(configs, roles, agreed))
    placement = place_processes(
        configs, report, trains="train" in roles and not accelerate.uses_cpu, serves="serve" in roles,
        machines=accelerate.machines,
    )  # fmt: skip
    if teaches_self and placement is not None and not placement.others:
        report(
            "no GPU is free for agentrl teach --self, which computes on the CPU then: leave one out of"
            " --train_gpus and --engine_gpus"
        )
    flags = fit(configs, flags, placement, accelerate.machines, report, is_training=is_training)
    if not has_database:
        mongo.up()
        stop = f"agentrl mongo down --mongo_dir {quoted(run.mongo_dir)}"
        report(f"MongoDB started (data in {run.mongo_dir}); stop it with: {stop}")
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
        teaches_self=teaches_self,
        has_demo_tools=servers is not None,
        inf_mem_ratio=configs[EngineConfig].inf_mem_ratio,
        drain_seconds=configs[ClaimConfig].drain_seconds,
        placement=placement,
        run=run if command == "train" and command in roles else None,
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

    Raises ModelError for a folder without a model, and ConfigError for an unknown extension or loss, and for
    an engine or a tracker that is not installed.
    """
    if set(roles) - {"serve"}:  # an engine serves a folder without a tokenizer
        require_folder(configs[ModelConfig])
    if "serve" in roles:
        require_engine(configs[EngineConfig].engine)
    model = configs[ModelConfig].model_name_or_path
    if model is not None and not {"serve", "train"}.isdisjoint(roles):
        require_config(Path(model), "--model_name_or_path")
        require_weights(Path(model))
    agreed: AgreedSettings = {}
    if not {"sample", "eval"}.isdisjoint(roles):
        require_extensions(configs)
        if model is not None and ("sample" in roles or configs[EvaluationConfig].eval_model is None):
            asyncio.run(open_format(None, configs))
    if "sample" in roles:
        read_limits(configs)
        agreed |= sampler_settings(configs)
    if "train" in roles:
        require_trackers(configs[TrainConfig].report_to)
        require_choice(configs[TrainConfig].resume_from_checkpoint)
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
        *(f"sampler {owner} ({alive.held(owner)} trajectories)" for owner in alive.samplers),
    ]
    return LeaseHeldError(
        "\n  ".join([f"run {run!r} is running already; nothing is started: {error.message}", *running]),
        hint=f"`agentrl status {run}` shows it; to add a sampler: the same command with the environment"
        f" variables ROLES=sample SAMPLERS=1; to stop the run: Ctrl-C where it was started, or `kill"
        f" {trainer.pid}` on {trainer.host}; if the trainer is dead, wait until its lease expires",
    )


SERVERS_FILE = shipped_files() / "mcp_servers.yml"
_MODELS = Path(".agentrl/models")
_MODEL_SECONDS = 2100.0
_UNITS_PORT, _UNITS_PORT_VARIABLE = 8765, "AGENTRL_UNITS_PORT"
"""The HTTP server of ``SERVERS_FILE``: its port, and the variable that names another one."""


def demo_model(seed: int | None = None) -> Path:
    """Return the folder of SmolLM2-135M, or of a two-layer model with ``seed``; make it if it is missing.

    A child process makes it, so that the caller does not keep torch in memory. Raises ModelError.
    """
    require("torch", "the demonstration's model", extra="quickstart")
    folder = _MODELS / ("SmolLM2-135M-Instruct" if seed is None else f"tiny-seed{seed}")
    words = ["demo/smollm.py", str(folder)] if seed is None else ["demo/tiny.py", "--warmed", str(seed)]
    try:
        code = run_child(
            [sys.executable, "-m", "agentrl.base.installation", *words],
            log=None,
            env={**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            seconds=_MODEL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{folder} was not made within {error.timeout:g} s", hint="try again") from error
    if code != 0:
        raise ModelError(
            f"{folder} was not made (exit code {code}); see the error above",
            hint="fix it and run this again; finished steps are not lost",
        )
    return folder


def default_servers(configs: Configs, *, is_demo: bool) -> Sequence[McpSpec] | None:
    """Return the tool servers of ``SERVERS_FILE`` if the run uses that file, else None.

    It is used by the demonstration, and if the tasks name tools that no path of ``--tools`` ends with, and no
    other servers are configured. Raises ConfigError if the tasks name a server that the file does not
    configure, and TaskFileError.
    """
    tools, tasks = configs[ToolConfig], configs[TaskConfig]
    path = tasks.eval_file or tasks.train_file
    configured = tools.mcp_servers_file or tools.mcp_manager_url or tools.tool_config_path
    if configured or path is None or is_address(path):
        return None
    rows = TaskRows.parse(tasks.task_preset, tasks.task_fields)
    read = read_task_source(path, shuffle=False, skip_bad_lines=tasks.skip_bad_lines, rows=rows)
    own = {name.strip().rpartition(":")[2] for name in tools.tools.split(",")}
    named = {tool for task in read.tasks for tool in task.tools or ()} - own
    if not named and not is_demo:
        return None
    servers = load_servers(SERVERS_FILE)
    missing = sorted(named - {server.name for server in servers})
    if missing:
        raise ConfigError(
            f"tasks of {path} name the tools {', '.join(missing)}, and none of --tools or of the tool servers"
            " is called so",
            hint="--tools module:name for a function of your own; for an MCP server export"
            " MCP_SERVERS_FILE=FILE.yml or MCP_MANAGER_URL=URL",
        )
    return servers


def units_server() -> tuple[list[str], dict[str, str]]:
    """Return the command of the demonstration's HTTP tool server, and the variable that tells its port."""
    chosen = str(free_port(_UNITS_PORT))
    command = [sys.executable, "-m", "agentrl.base.installation", "demo/units.py", "--port", chosen]
    return command, {_UNITS_PORT_VARIABLE: chosen}


_BESIDE_ENGINE = 0.45
"""Fraction of a GPU's memory for each of two engines on it, without ``--inf_mem_ratio``."""
_ENDING_SECONDS = 5.0
"""Limit of the look for how long the trainer needs to end."""
_MEASURED = 8
"""Last steps whose longest tells how long the next one takes."""
_CHECKPOINT_SIZE = 3.0
"""Bytes of a checkpoint, in bytes of a version."""
_SERVING_SECONDS = 60.0
"""How long the trainer's start waits for an engine, at most."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The processes of this machine."""

    name: str
    """What the lines on the terminal begin with."""
    logs: Path
    flags: Sequence[str]
    """The run's flags, which every process gets."""
    engines: int
    port: int = 0
    """Port of the first engine; 0 for any free ones."""
    samplers: int
    teaches: bool = False
    """Whether a teacher is started (``--teacher``)."""
    teaches_self: bool = False
    """Whether the policy's own logprobs at earlier versions are computed (``--old_logprobs version``)."""
    main: Sequence[str] | None
    """The command of the trainer or of an evaluation; None if this machine runs neither."""
    follows: bool = False
    """Whether versions are evaluated while they are trained."""
    has_demo_tools: bool
    """Whether the demonstration's HTTP tool server is started."""
    inf_mem_ratio: float | None = None
    """``--inf_mem_ratio``, if it was given."""
    drain_seconds: float = ClaimConfig.drain_seconds
    placement: Placement | None = None
    """None on a machine without GPUs: all processes then get this one's environment."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of every process."""
    run: RunConfig | None = None
    """The run whose trainer is the main process; None without a trainer."""

    def report(self, text: str) -> None:
        """Print a line about the run."""
        print(f"{self.name}: {text}", flush=True)


Command = Callable[[], Sequence[str] | None]
"""Returns a command, or None if there is nothing to do."""


def run_processes(
    plan: RunPlan,
    deadline: Callable[[], float] = lambda: float("inf"),
    serving: threading.Event | None = None,
    *,
    before: Command = lambda: None,
    after: Command = lambda: None,
) -> int:
    """Run until the main process ends, and return its exit code; without one until all helpers have ended.

    ``deadline`` is the end of the main process, as ``time.monotonic`` counts. With ``serving``, which is set
    when an engine serves, the main process starts after it if the processes share very few cores: it loads
    while the first trajectories are sampled, and not before. The command of ``before`` runs while an engine
    serves and nothing is trained yet, that of ``after`` when the main process has done its work; their output
    is in a log, and their failure changes nothing. Raises ConfigError for a process that cannot run as it is
    configured, and AgentRLError for one that has crashed too often.
    """
    run = plan.run
    supervisor = Supervisor(plan.report, lambda: None if run is None else asyncio.run(trainer_ending(run)))
    helpers, main = processes_of(plan)
    try:
        for member in helpers:
            supervisor.start(member)
            plan.report(f"{member.name} started (pid {member.pid}, {member.log})")
        if main is None:
            supervisor.run_helpers()
            return 0
        opening = before()
        if serving is not None and (opening or (plan.placement is None and half_of_cores() == 1)):
            supervisor.wait(serving, _SERVING_SECONDS)
        _run_beside(supervisor, plan, main, opening)
        code = supervisor.run_main(main, deadline=deadline)
        if code == 0 and (closing := after()):
            for helper in helpers:
                if not helper.is_server:  # what samplers would begin is not trained any more
                    helper.signal(signal.SIGTERM)
            _run_beside(supervisor, plan, main, closing)
        return code
    except StoppedBySignalError:
        saves = "the trainer finishes its step and saves; " if run is not None else ""
        plan.report(f"stopping: {saves}the same command resumes; Ctrl-C again ends all processes at once")
        raise
    finally:
        supervisor.stop(plan.drain_seconds)


_BESIDE_SECONDS = 300.0


def _run_beside(
    supervisor: Supervisor, plan: RunPlan, main: SupervisedProcess, command: Sequence[str] | None
) -> None:
    if command:
        log = plan.logs / f"{plan.name}_evaluation.out"
        member = SupervisedProcess("evaluation", command, log, main.env)
        code = supervisor.run_main(member, deadline=time.monotonic() + _BESIDE_SECONDS)
        if code != 0:
            said = exit_reason(log).splitlines()[-1]
            plan.report(f"the evaluation ended with exit code {code}: {said} ({log})")


async def trainer_ending(run: RunConfig) -> Ending | None:
    """Return how long the trainer of a run needs to finish its step and save; None if it has nothing to save.

    By the step that it has planned, what its heartbeat says, and the last steps and checkpoints.
    """
    try:
        async with asyncio.timeout(_ENDING_SECONDS), await open_existing(run) as store:
            lease, steps = await store.trainer_lease.read(), await store.steps.metrics(_MEASURED)
            last = max(steps, default=0)
            planned = await store.steps.find(after=last, status=StepStatus.PLANNED)
            at = await store.connection.server_time()
    except RunMissingError:
        return None
    except (AgentRLError, TimeoutError):
        return Ending(what="the trainer has saved its step")
    begun = [step for step in planned if step.attempt == lease.attempt]
    doing = Doing(work=Work.STARTING) if lease.doing is None else lease.doing
    is_training = bool(begun) or doing.work is Work.TRAINING
    if not lease.is_held(at) or not (is_training or steps) or (doing.work is Work.STARTING and not begun):
        return None
    what = f"step {last + 1} is trained and saved" if is_training else f"step {last} is saved"

    def longest(measure: Callable[[Mapping[str, float]], float | None]) -> float | None:
        return max(filter(None, map(measure, steps.values())), default=None)

    training = longest(lambda step: (seconds_of(step) or 0.0) - step.get("seconds_data", 0.0))
    publishing = longest(lambda step: step.get("seconds_publish_background"))
    saving = longest(lambda step: step.get("seconds_save_background"))
    if saving is None and publishing is not None:
        saving = _CHECKPOINT_SIZE * publishing
    if training is None or saving is None:
        return Ending(what=what)
    done = (at - begun[0].planned_at).total_seconds() if begun else 0.0
    writing = saving + (publishing or 0.0)
    left = max(0.0, training - max(0.0, done)) if is_training else 0.0
    # Allow for a step in any case: one may have begun since the last heartbeat.
    return Ending(what=what, seconds=left + writing, longest=training + writing)


def processes_of(plan: RunPlan) -> tuple[list[SupervisedProcess], SupervisedProcess | None]:
    """Return the helpers of ``plan`` in the order of their start, and its main process. Starts nothing."""
    placement = plan.placement
    others: Numbers = placement.others if placement is not None else ()
    engines: Sequence[Numbers] = placement.engines if placement is not None else [()] * plan.engines
    # An evaluation that starts an engine of its own does so on the last engine's GPUs, if no GPU is free.
    beside_last = plan.follows and placement is not None and not others and bool(engines)
    tool_server, variables = units_server() if plan.has_demo_tools else ([], {})
    variables |= plan.variables
    helpers: list[SupervisedProcess] = []

    def environment(numbers: Numbers, *, computes: bool = False) -> dict[str, str]:
        """Return the environment of a process that sees the GPUs ``numbers`` of the placement.

        One that ``computes`` on the CPU shares its cores with another one.
        """
        threads = half_of_cores() if computes and placement is None else 1
        seen = placement.gpus.environment(numbers) if placement is not None else {}
        return {**environment_of_children(threads), **variables, **seen}

    def add(name: str, command: Sequence[str], env: Mapping[str, str], *, is_server: bool = False) -> None:
        log = plan.logs / f"{plan.name}_{name}.out"  # another run may have the same folder
        helpers.append(SupervisedProcess(name, command, log, env, is_server=is_server))

    def share(fraction: float) -> list[str]:
        return ["--inf_mem_ratio", str(fraction)] if plan.inf_mem_ratio is None else []

    if tool_server:
        add("units-server", tool_server, without_uri(environment(others)), is_server=True)
    for index, numbers in enumerate(engines):
        flags = [*plan.flags, *(["--port", str(plan.port + index)] if plan.port else [])]
        if placement is not None and set(numbers) & set(placement.shared):
            flags += ["--colocate", "true"] if placement.is_colocated else share(SHARED_MEMORY)
        elif beside_last and index == len(engines) - 1:
            flags += share(_BESIDE_ENGINE)
        name = f"engine-{index}" if len(engines) > 1 else "engine"
        add(name, agentrl_command("serve", flags), environment(numbers, computes=True), is_server=True)
    for index in range(plan.samplers):
        add(f"sampler-{index}", agentrl_command("sample", plan.flags), environment(others))
    if plan.teaches:
        add("teacher", agentrl_command("teach", plan.flags), environment(others, computes=True))
    if plan.teaches_self:
        words = agentrl_command("teach", ["--self", "true", *plan.flags])
        add("old-logprobs", words, environment(others, computes=True))
    if plan.follows:
        flags = [*plan.flags, *(share(_BESIDE_ENGINE) if beside_last else [])]
        add("evaluation", agentrl_command("eval", flags), environment(engines[-1] if beside_last else others))
    if plan.main is None:
        return helpers, None
    trainer = placement.trainer if placement is not None else ()
    # torchrun kills its ranks after 30 s by itself; here the supervisor decides, by the length of a step.
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "86400", **environment(trainer or others, computes=True)}
    return helpers, SupervisedProcess("main", plan.main, None, env)


def agentrl_command(command: str, flags: Sequence[str]) -> list[str]:
    """Return the words that start ``agentrl COMMAND`` with this interpreter."""
    return [sys.executable, "-m", "agentrl", command, *flags]


def environment_of_children(threads: int = 1) -> dict[str, str]:
    """Return this process's environment; variables that are set win over the limits of threads."""
    return {**thread_limits(threads), **os.environ}
