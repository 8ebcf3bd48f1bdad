"""From configuration to a StepComputer: model, optimizer, schedule and loss on their device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from agentrl.config.schema import (
    AdapterConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from agentrl.errors import ConfigError
from agentrl.losses.settings import LossSettings
from agentrl.train.compute import StepComputer
from agentrl.train.logprobs import DEFAULT_CHUNK, DEFAULT_VOCAB_CHUNK
from agentrl.train.memory import checkpointing_mode, compile_layers, enable_checkpointing
from agentrl.train.model import load_policy
from agentrl.train.optim import build_optimizer, freeze
from agentrl.train.reference import Anchors, build_reference
from agentrl.train.schedules import build_scheduler
from agentrl.train.step import ForwardOptions, check_model


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
    temperature: float = 1.0
    """Of sampling."""


def build_computer(recipe: Recipe, *, weights: Path | None, total_steps: int | None) -> StepComputer:
    """Load the model (``weights``: a checkpoint's instead of the base's) and set up what trains it.

    ``total_steps`` is where a falling schedule ends. Raises ModelError and ConfigError.
    """
    settings = LossSettings(**dataclasses.asdict(recipe.loss))
    accelerator = Accelerator(mixed_precision="no")
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"{accelerator.num_processes} processes were launched, and this trainer runs in a single one",
            cure="launch it with --num_processes 1",
        )
    set_seed(recipe.seed)
    policy = load_policy(recipe.model, weights, recipe.adapter)
    policy.model.to(accelerator.device)
    check_model(policy.model)
    mode = checkpointing_mode(recipe.memory, recipe.train.gradient_checkpointing)
    enable_checkpointing(policy.model, mode, offload=recipe.memory.activation_offload)
    if recipe.memory.torch_compile:
        compile_layers(policy.model)
    freeze(policy.model, recipe.optim.freeze)
    optimizer = build_optimizer(policy.model, recipe.optim, recipe.memory)
    updates = recipe.optim.num_epochs_per_batch * recipe.optim.mini_batches
    return StepComputer(
        accelerator=accelerator,
        policy=policy,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, recipe.optim, total_steps),
        settings=settings,
        options=ForwardOptions(
            temperature=recipe.temperature,
            chunk_size=recipe.train.loss_seq_chunk_size or DEFAULT_CHUNK,
            vocab_chunk_size=recipe.memory.loss_vocab_chunk_size or DEFAULT_VOCAB_CHUNK,
            autocast_dtype=torch.bfloat16 if recipe.train.autocast_bf16 else None,
        ),
        max_tokens=recipe.train.max_tokens,
        prefix_merging=recipe.train.prefix_merging,
        max_grad_norm=recipe.optim.max_grad_norm,
        anchors=Anchors(
            start=updates > 1 and recipe.loss.old_logprobs != "behavior",
            reference=build_reference(recipe.loss, recipe.model, policy, policy.model.device),
        ),
        epochs=recipe.optim.num_epochs_per_batch,
        mini_batches=recipe.optim.mini_batches,
    )
