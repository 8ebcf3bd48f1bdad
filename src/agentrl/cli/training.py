"""``agentrl train`` trains on sampled groups, ``sft`` on conversations or Records; ``plan`` sizes a run.

    agentrl train --run_name demo --model_name_or_path models/base --max_steps 100
    accelerate launch --config_file assets/fsdp2_dst.yml -m agentrl.train --run_name demo …
    agentrl sft --model_name_or_path BASE --train_file conversations.jsonl --output_dir OUT --max_steps 240
    torchrun --nproc_per_node 8 -m agentrl sft …
    agentrl sft --model_name_or_path BASE --sft_from_records RUN --sft_min_score 1 --output_dir OUT
    agentrl plan --model FOLDER --gpus 8xH100

SIGTERM and SIGINT let the current step finish and be saved; the same command resumes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.agreement import require_trainable
from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    AdapterConfig,
    ClaimConfig,
    DeviceConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TraceConfig,
    TrainConfig,
)
from agentrl.config.training import PlanConfig, SFTConfig
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.local.plan.search import Search, Services

NOTHING_FITS = 3
"""Exit code of ``agentrl plan`` when no layout fits."""


def train(argv: list[str]) -> int:
    """Parse ``argv`` and train; return 0 when training has ended or was asked to stop."""
    configs = parse(
        argv,
        command="agentrl train",
        description="Train on sampled groups, publish the weights, save checkpoints; resume after a restart.",
        shown=(
            RunConfig, ModelConfig, TaskConfig, SamplingConfig, ClaimConfig, LossConfig, OptimConfig,
            AdapterConfig, MemoryConfig, TrainConfig, DeviceConfig, TraceConfig,
        ),
        validate=_check_flags,
    )  # fmt: skip
    from agentrl.observe.logging import setup
    from agentrl.weights.folder import base_folder

    setup(configs[RunConfig], "train")
    base_folder(configs[ModelConfig])
    from agentrl.train.start import run_trainer

    run_trainer(configs)
    return 0


def sft(argv: list[str]) -> int:
    """Parse ``argv``, train, and write a Hugging Face folder to ``--output_dir``."""
    configs = parse(
        argv,
        command="agentrl sft",
        description='Supervised fine-tuning on JSONL lines {"messages": […], "tools": […]}, or on Records.',
        shown=(RunConfig, ModelConfig, TaskConfig, OptimConfig, AdapterConfig, TrainConfig, MemoryConfig),
        extra=(SFTConfig,),
    )
    from agentrl.observe.logging import setup
    from agentrl.weights.folder import base_folder

    setup(configs[RunConfig], "sft")
    base_folder(configs[ModelConfig])
    from agentrl.train.sft import fine_tune

    fine_tune(configs)
    return 0


def _check_flags(configs: Configs) -> None:
    """Raise ConfigError for flags with which nothing could be trained, and for those that change nothing."""
    from agentrl.base.registry import import_modules
    from agentrl.losses.settings import check_loss

    import_modules(configs[TaskConfig].imported_modules)
    require_trainable(configs)
    check_loss(configs)


def plan(argv: list[str]) -> int:
    """Print the plan; return 3 if no layout fits."""
    configs = parse(
        argv,
        command="agentrl plan",
        description="Plans a training run without a GPU: memory per rank, the layouts that fit, ordered by"
        " estimated time, their flags, and how many samplers, engines and database nodes they need. Sizes and"
        " memory flags that are given are kept; the others are searched.",
        shown=[
            ModelConfig,
            TaskConfig,
            TrainConfig,
            MemoryConfig,
            AdapterConfig,
            OptimConfig,
            DeviceConfig,
        ],
        extra=[PlanConfig],
    )
    search, services = _search(configs)
    from agentrl.local.plan.report import plan_json, print_plan
    from agentrl.observe.terminal import stdout_console

    if configs[PlanConfig].json:
        print(json.dumps(plan_json(search, services), indent=2))
    else:
        print_plan(stdout_console(), search, services)
    return NOTHING_FITS if services is None else 0


def _search(configs: Configs) -> tuple[Search, Services | None]:
    """Return the layouts, and the services beside the fastest one that fits; None if none fits."""
    from agentrl.local.plan.search import build_workload, parse_gpus

    flags = configs[PlanConfig]
    folder = flags.model or configs[ModelConfig].model_name_or_path
    if folder is None:
        raise ConfigError("no model is given", hint="give --model FOLDER; its config.json is enough")
    cluster = parse_gpus(
        flags.gpus,
        memory_gib=flags.gpu_memory_gib,
        per_node=flags.gpus_per_node,
        network_gbps=flags.network_gbps,
    )
    engine = parse_gpus(flags.engine_gpu).gpu if flags.engine_gpu else cluster.gpu
    work = build_workload(configs)
    from agentrl.local.plan.memory import open_model, reference_parameters
    from agentrl.local.plan.search import Search, size_services

    trust = configs[ModelConfig].trust_remote_code
    model = open_model(Path(folder), flags.context, trust_remote_code=trust)
    search = Search(
        model=model, work=work, cluster=cluster, configs=configs,
        reference_parameters=reference_parameters(configs, model),
    )  # fmt: skip
    search.run()
    fitting = next((item for item in search.verdicts if item.state == "fits"), None)
    if fitting is None:
        return search, None
    return search, size_services(
        model, work, fitting.candidate.time.total, engine,
        request_tokens_per_second=flags.request_tokens_per_second, tool_seconds=flags.tool_seconds,
    )  # fmt: skip
