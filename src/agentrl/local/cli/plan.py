"""``agentrl plan`` sizes a training run without a GPU.

agentrl plan --model FOLDER --gpus 8xH100
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    AdapterConfig,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.config.training import PlanConfig
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.local.plan.search import PlannedServices, Search

NOTHING_FITS = 3
"""Exit code of ``agentrl plan`` when no layout fits."""


def main(argv: list[str]) -> int:
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


def _search(configs: Configs) -> tuple[Search, PlannedServices | None]:
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
