"""From configuration to a PolicyTrainer: model, optimizer, schedule and loss on their device."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_seed

from agentrl.config.schema import (
    AdapterConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from agentrl.distributed.gradients import split_by_mesh
from agentrl.distributed.mesh import Layout, build_mesh, parallelize, plan_layout
from agentrl.errors import ConfigError
from agentrl.losses.settings import LossSettings
from agentrl.model.load import load_policy
from agentrl.model.logprobs import DEFAULT_CHUNK
from agentrl.model.output_head import DEFAULT_VOCAB_CHUNK
from agentrl.train.compute import PolicyTrainer
from agentrl.train.memory import checkpointing_mode, compile_layers, enable_checkpointing
from agentrl.train.optimizer import build_optimizer, freeze
from agentrl.train.reference import FrozenLogprobs, build_reference
from agentrl.train.schedules import build_scheduler
from agentrl.train.step import ForwardOptions, check_model

if TYPE_CHECKING:
    from agentrl.distributed.fsdp import Parallel
    from agentrl.distributed.world import World


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The part of a run's configuration that decides how a step is computed."""

    model: ModelConfig
    loss: LossConfig
    optim: OptimConfig
    train: TrainConfig
    seed: int
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)


def build_computer(
    recipe: Recipe, *, weights: Path | None, total_steps: int | None, team: World | None = None
) -> PolicyTrainer:
    """Load the model (``weights``: a checkpoint's instead of the base's) and set up what trains it.

    ``total_steps`` is where a falling schedule ends. ``team``: the processes that train together; each of
    them calls this. Raises ModelError and ConfigError.
    """
    settings = LossSettings.of(recipe.loss)
    _check_processes(recipe, team)
    layout = plan_layout(recipe.train, team.world if team else 1)
    device = team.device if team else _own_device()
    set_seed(recipe.seed)
    policy = load_policy(recipe.model, weights, recipe.adapter)
    if team is None:  # of a model that is spread, a device gets its part alone
        policy.model.to(device)  # type: ignore[arg-type]
    check_model(policy.model)
    mode = checkpointing_mode(recipe.memory, recipe.train.gradient_checkpointing)
    enable_checkpointing(policy.model, mode, offload=recipe.memory.activation_offload)
    if recipe.memory.torch_compile:
        compile_layers(policy.model)
    freeze(policy.model, recipe.optim.freeze)
    parallel = _spread(policy.model, layout, device, recipe) if team else None
    optimizer = build_optimizer(policy.model, recipe.optim, recipe.memory)
    if parallel is not None:
        optimizer.param_groups[:] = split_by_mesh(optimizer.param_groups)
    updates = recipe.optim.num_epochs_per_batch * recipe.optim.mini_batches
    return PolicyTrainer(
        device=device,
        policy=policy,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, recipe.optim, total_steps),
        settings=settings,
        options=ForwardOptions(
            chunk_size=recipe.train.loss_seq_chunk_size or DEFAULT_CHUNK,
            vocab_chunk_size=recipe.memory.loss_vocab_chunk_size or DEFAULT_VOCAB_CHUNK,
            autocast_dtype=torch.bfloat16 if recipe.train.autocast_bf16 else None,
        ),
        max_tokens=recipe.train.max_tokens,
        prefix_merging=recipe.train.prefix_merging,
        max_grad_norm=recipe.optim.max_grad_norm,
        anchors=FrozenLogprobs(
            start=updates > 1 and recipe.loss.old_logprobs != "behavior",
            reference=build_reference(recipe.loss, recipe.model, policy, policy.model.device),
        ),
        epochs=recipe.optim.num_epochs_per_batch,
        mini_batches=recipe.optim.mini_batches,
        memory=dataclasses.replace(recipe.memory, activation_checkpointing=mode),
        parallel=parallel,
    )


def _own_device() -> torch.device:
    """The machine's accelerator, or its CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def _spread(model: Any, layout: Layout, device: torch.device, recipe: Recipe) -> Parallel:
    from agentrl.distributed.fsdp import Parallel, RankedModel

    mesh = build_mesh(layout, device.type)
    parallelize(model, mesh, recipe.train)
    ranked = RankedModel(model, mesh).to(device)
    return Parallel(mesh, ranked, recipe.memory.gradient_reduction)


def _check_processes(recipe: Recipe, team: World | None) -> None:
    """Refuse what one process can do and several cannot."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if team is None and launched > 1:
        raise ConfigError(
            f"{launched} processes were launched, and this command runs in a single one",
            hint="launch it with one process; `agentrl train` and `agentrl sft` take several",
        )
    if team is None:
        return
    _check_splits(recipe, "lora_rank", recipe.adapter.lora_rank)
    _check_splits(recipe, "torch_compile", recipe.memory.torch_compile)
    if recipe.memory.activation_offload:
        raise ConfigError(
            "--activation_offload true: it has not been run in several processes",
            hint="leave it out, or train in one process",
        )


def _check_splits(recipe: Recipe, name: str, value: object) -> None:
    """Refuse a flag that works on sharded layers, where processes split them."""
    for size in ("tp_size", "pp_size", "ep_size"):
        ranks = getattr(recipe.train, size)
        if value and ranks > 1:
            raise ConfigError(
                f"--{name} {value} with --{size} {ranks}: it works on layers that are sharded over processes"
                " with data of their own, and not on layers that are split",
                hint=f"set --{size} 1: those processes shard the layers too; or leave out --{name}",
            )
