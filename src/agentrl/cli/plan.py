"""``agentrl plan``: memory per rank, layouts that fit, estimated step time and services, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.config.load import parse
from agentrl.config.schema import (
    AdapterConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.config.training import PlanConfig
from agentrl.errors import ConfigError

NOTHING_FITS = 3
"""Exit code when no layout fits."""


def main(argv: list[str]) -> int:
    """Print the plan; return 3 if no layout fits."""
    configs = parse(
        argv,
        command="agentrl plan",
        description="Plans a training run without a GPU: memory per rank, the layouts that fit, ordered by"
        " estimated time, their flags, and how many samplers, engines and database nodes they need. Sizes and"
        " memory flags that are given are kept; the others are searched.",
        shown=[ModelConfig, TaskConfig, TrainConfig, MemoryConfig, AdapterConfig, OptimConfig],
        extra=[PlanConfig],
    )
    plan = configs[PlanConfig]
    folder = plan.model or configs[ModelConfig].model_name_or_path
    if folder is None:
        raise ConfigError("no model is given", hint="give --model FOLDER; its config.json is enough")

    from agentrl.plan.workload import parse_gpus

    cluster = parse_gpus(
        plan.gpus, memory_gib=plan.gpu_memory_gib, per_node=plan.gpus_per_node, network_gbps=plan.network_gbps
    )
    engine = parse_gpus(plan.engine_gpu).gpu if plan.engine_gpu else cluster.gpu
    from agentrl.observe.terminal import stdout_console
    from agentrl.plan.estimates import size_services
    from agentrl.plan.model import open_model, reference_parameters
    from agentrl.plan.report import plan_json, print_plan
    from agentrl.plan.search import Search
    from agentrl.plan.workload import build_workload

    work = build_workload(configs)
    trust = configs[ModelConfig].trust_remote_code
    model = open_model(Path(folder), plan.context, trust_remote_code=trust)
    search = Search(
        model=model, work=work, cluster=cluster, configs=configs,
        reference_parameters=reference_parameters(configs, model),
    )  # fmt: skip
    search.run()
    fitting = next((item for item in search.verdicts if item.state == "fits"), None)
    services = None
    if fitting is not None:
        services = size_services(
            model, work, fitting.candidate.time.total, engine,
            request_tokens_per_second=plan.request_tokens_per_second, tool_seconds=plan.tool_seconds,
        )  # fmt: skip
    if plan.json:
        print(json.dumps(plan_json(search, services), indent=2))
    else:
        print_plan(stdout_console(), search, services)
    return 0 if fitting is not None else NOTHING_FITS
