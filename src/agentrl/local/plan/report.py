"""Print a plan: the layouts that fit with their memory and flags, the services, and what was refused."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from agentrl.config.flags import flag_words
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AdapterConfig,
    AgentConfig,
    EngineConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    SamplingConfig,
    TrainConfig,
)
from agentrl.distributed.mesh import DIMENSIONS
from agentrl.inference.engines.commands import COLOCATED_MEMORY
from agentrl.local.plan.memory import PARTS
from agentrl.local.plan.search import Candidate, FitVerdict, PlannedServices, Search, name_of
from agentrl.observe.terminal import clean, table

NOTE = (
    "Memory follows closed forms; docs/sizing.md compares them with simulated steps, and with real ones on a"
    " CPU. Seconds are a roofline of data-sheet figures. Neither was measured on several GPUs."
)
_BFLOAT16 = (
    "The weights are trained in bfloat16, which rounds small updates away; plan --dtype float32 for weights"
    " and moments in float32."
)
_GIB = 2**30
_SHOWN_REFUSALS = 8
_SHORT = ("weights", "grads", "moments", "gathered", "activ.", "logits", "backward", "reference")
"""Headings of ``PARTS``."""


def command(search: Search, candidate: Candidate) -> str:
    """Return the command that trains with the candidate's layout."""
    layout, configs, cluster = candidate.layout, search.configs, search.cluster
    flags: dict[str, Any] = {
        "model_name_or_path": search.model.folder,
        "max_tokens": search.work.max_tokens,
        "groups_per_step": search.work.groups,
        "num_generations": search.work.group_size,
        **_call_limits(configs, search.work.max_tokens),
    }
    flags |= {
        f"{name}_size": getattr(layout, name)
        for name in DIMENSIONS
        if name != "dp_shard" and getattr(layout, name) > 1
    }
    if candidate.checkpointing != "none":
        flags["activation_checkpointing"] = candidate.checkpointing
    if candidate.reduction != "last":
        flags["gradient_reduction"] = candidate.reduction
    flags |= _given(configs)
    nodes = -(-cluster.count // cluster.per_node)
    launcher = ["accelerate", "launch", "--config_file", "assets/fsdp2_dst.yml"]
    launcher += ["--num_processes", str(cluster.count)]
    if nodes > 1:
        launcher += ["--num_machines", str(nodes), "--machine_rank", "RANK", "--main_process_ip", "ADDRESS"]
    return shlex.join([*launcher, "-m", "agentrl.train", "--run_name", "my_run", *flag_words(flags)])


def _call_limits(configs: Configs, max_tokens: int) -> dict[str, int]:
    """Return limits of a model call with which it fits into a micro-batch, as the trainer requires."""
    new = configs[SamplingConfig].max_new_tokens
    if "max_new_tokens" not in configs.given:
        new = min(new, max(1, max_tokens // 4))
    prompt = min(configs[AgentConfig].max_prompt_tokens, max(1, max_tokens - new))
    return {"max_prompt_tokens": prompt, "max_new_tokens": new}


def _given(configs: Configs) -> dict[str, Any]:
    """Return the flags of the trainer that were given and that the plan took as they are."""
    planned = {"max_tokens", "groups_per_step", "activation_checkpointing", "gradient_reduction"}
    planned |= {f"{name}_size" for name in DIMENSIONS} | {"model_name_or_path", "gradient_checkpointing"}
    return {
        name: value
        for group in (ModelConfig, TrainConfig, MemoryConfig, AdapterConfig, LossConfig, OptimConfig)
        for name, value in vars(configs[group]).items()
        if name in configs.given and name not in planned
    }


def print_plan(console: Console, search: Search, services: PlannedServices | None) -> None:
    """Print the plan as text and tables."""
    work, gpu, model = search.work, search.cluster.gpu, search.model
    weights, products = _dtypes(search)
    console.print(
        f"{clean(model.folder)}: {type(model.module).__name__},"
        f" {model.parameters / 1e6:,.1f} million parameters, {weights} weights, {products} products,"
        f" context {model.context or 'unbounded'}\n"
        f"{search.cluster.count} × {gpu.name}, {search.limit / _GIB:.1f} of {gpu.memory_gib:g} GiB planned\n"
        f"step: {work.trajectories} trajectories of {work.trajectory_tokens} tokens in {work.turns} turns,"
        f" {work.computed_tokens} tokens computed, micro-batches of {work.max_tokens}"
    )
    if search.precision.weights == torch.bfloat16 and not search.configs[AdapterConfig].lora_rank:
        console.print(Text(_BFLOAT16))
    if search.reference_parameters:
        size = search.reference_parameters * search.precision.products.itemsize / _GIB
        console.print(Text(f"The reference model of the loss, {size:.2f} GiB, is sharded like the policy."))
    if model.alone:
        console.print(Text(f"The model has {model.alone}: each sequence runs alone, and nothing is merged."))
    fits = _fitting(search)
    _print_fitting(console, search, fits)
    _print_others(console, search)
    if services is not None:
        _print_services(console, services, _turns(search, fits[0]))
    console.print(Text(NOTE, "italic"))


def _fitting(search: Search) -> list[FitVerdict]:
    return [verdict for verdict in search.verdicts if verdict.state == "fits"]


def _print_fitting(console: Console, search: Search, fits: list[FitVerdict]) -> None:
    if not fits:
        console.print(Text("No layout fits.", "bold red"))
        return
    named = [[name_of(item.candidate.layout), item.candidate.checkpointing] for item in fits]
    rows = [
        [*name, item.candidate.reduction, f"{item.candidate.time.total:.1f}", _gib(item.memory.peak)]
        for name, item in zip(named, fits, strict=True)
    ]
    columns = ["layout", "checkpointing"]
    console.print(
        table(
            "Layouts that fit, by estimated seconds of a step; GiB of the rank that needs most",
            [*columns, "gradient reduction", "seconds", "peak GiB"],
            rows,
            text=3,
        )
    )
    parts = [
        [*name, *(_gib(item.memory.parts.get(part, 0)) for part in PARTS)]
        for name, item in zip(named, fits, strict=True)
    ]
    console.print(table("Parts of the peak in GiB", [*columns, *_SHORT], parts, text=2))
    for item in fits:
        console.print(Text(name_of(item.candidate.layout), "bold"))
        console.print(command(search, item.candidate), soft_wrap=True)


def _print_others(console: Console, search: Search) -> None:
    others = [item for item in search.verdicts if item.state == "too large"]
    rows = [
        [name_of(item.candidate.layout), item.candidate.checkpointing, item.candidate.reduction, item.reason]
        for item in others[:_SHOWN_REFUSALS]
    ]
    rows += [
        [f"{name_of(layouts[0])}{_more(len(layouts))}", "", "", reason]
        for reason, layouts in list(search.refused.items())[:_SHOWN_REFUSALS]
    ]
    if rows:
        console.print(
            table("Layouts that do not", ["layout", "checkpointing", "reduction", "why"], rows, text=4)
        )
    counts: Counter[str] = Counter(item.state for item in search.verdicts)
    counts["refused"] += sum(len(layouts) for layouts in search.refused.values())
    console.print("layouts with flags: " + ", ".join(f"{count} {state}" for state, count in counts.items()))


def _turns(search: Search, fitting: FitVerdict) -> dict[str, float] | None:
    """Return the GiB of a GPU that an engine and the step use in turns; None without ``--colocate true``.

    The larger one has to fit, not their sum.
    """
    config = search.configs[EngineConfig]
    if not config.is_colocated:
        return None
    engine = search.cluster.gpu.memory_gib * (config.inf_mem_ratio or COLOCATED_MEMORY)
    step = fitting.memory.peak / _GIB
    return {"engine": engine, "step": step, "in_turns": max(engine, step), "at_once": engine + step}


def _print_services(console: Console, found: PlannedServices, turns: dict[str, float] | None) -> None:
    one_device = [] if turns is None else [
        ["one device", "the engine's {engine:.1f} GiB and the step's {step:.1f} in turns (--colocate):"
         " {in_turns:.1f} of a GPU, not {at_once:.1f}".format(**turns)],
    ]  # fmt: skip
    rows = [
        *one_device,
        ["trajectories", f"{found.trajectories_per_second:.2f}/s, {found.in_flight} at the same time"],
        ["samplers", f"{found.samplers} processes ({found.sampler_cores:.2f} cores of work for"
         f" {found.turns_per_second:.1f} turns/s, {found.sampler_memory_gib:.1f} GiB)"],
        ["engines", f"{found.engines} × {found.engine_tp} {found.engine_gpu} (roofline:"
         f" {found.engine_tokens_per_second:.0f} tokens/s each; {found.generated_per_second:.0f} needed)"],
        ["gateways", f"{found.gateway_cores:.2f} cores of work if all calls go through them"],
        ["database", f"{found.database_nodes} nodes (1 without redundancy), {found.mongod_cores:.2f} cores of"
         f" work, {found.stored_gib_per_hour:.1f} GiB an hour"],
    ]  # fmt: skip
    console.print(table("Services that keep the first layout busy", ["service", "size"], rows, text=2))


def _dtypes(search: Search) -> tuple[str, str]:
    """Return the names of the dtypes of weights and of products."""
    precision = search.precision
    weights, products = (str(item).removeprefix("torch.") for item in (precision.weights, precision.products))
    return weights, products


def plan_json(search: Search, services: PlannedServices | None) -> dict[str, Any]:
    """Return the plan as JSON: bytes, seconds, and layouts by dimension."""
    work, model, cluster = search.work, search.model, search.cluster
    weights, products = _dtypes(search)
    return {
        "model": {
            "folder": str(model.folder), "parameters": model.parameters,
            "expert_parameters": model.expert_parameters, "dtype": weights, "products": products,
            "context": model.context,
        },
        "gpus": {**asdict(cluster.gpu), "count": cluster.count, "planned_bytes": search.limit},
        "step": asdict(work),
        "layouts": [_verdict_json(search, item) for item in search.verdicts],
        "refused": [
            {"reason": reason, "layouts": [_sizes(layout) for layout in layouts]}
            for reason, layouts in search.refused.items()
        ],
        "services": None if services is None else asdict(services),
        "turns": None if services is None else _turns(search, _fitting(search)[0]),
        "note": NOTE,
    }  # fmt: skip


def _verdict_json(search: Search, item: FitVerdict) -> dict[str, Any]:
    candidate, memory = item.candidate, item.memory
    return {
        "layout": _sizes(candidate.layout),
        "activation_checkpointing": candidate.checkpointing,
        "gradient_reduction": candidate.reduction,
        "state": item.state,
        "reason": item.reason,
        "seconds": candidate.time.total,
        "seconds_by_part": asdict(candidate.time),
        "peak_bytes": memory.peak,
        "bytes_by_part": dict(memory.parts),
        "command": command(search, candidate) if item.state == "fits" else None,
    }


def _sizes(layout: Any) -> dict[str, int]:
    return dict(zip(DIMENSIONS, layout.sizes, strict=True))


def _gib(value: int) -> str:
    return f"{value / _GIB:.2f}"


def _more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""
