"""Load a run's policy and split it over the ranks, as everything does that computes what the trainer does."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from agentrl.config.load import Configs
from agentrl.config.schema import AdapterConfig, MemoryConfig, ModelConfig, TrainConfig
from agentrl.data.forest import TokenForest
from agentrl.data.planner import CPU_FILL, PrefixMerging, build_micro_batches
from agentrl.distributed.load_shards import load_shards
from agentrl.distributed.mesh import Layout, World, build_mesh, join_alone
from agentrl.distributed.parallel_model import ParallelModel, parallelize
from agentrl.documents.images import Image
from agentrl.documents.training import DBRecordData
from agentrl.errors import ConfigError, ModelError
from agentrl.model.check_model import check_model, check_replay
from agentrl.model.flops import Precision, choose_precision
from agentrl.model.load import Policy, load_policy
from agentrl.model.logprobs import DEFAULT_VOCAB_CHUNK, ForwardOptions
from agentrl.model.routing import RouterReplay
from agentrl.model.vision import attach_pixels
from agentrl.weights.folder import architecture, base_folder, replayed_experts

logger = logging.getLogger(__name__)


def step_precision(model: ModelConfig, train: TrainConfig, world: World) -> Precision:
    """Return ``choose_precision`` on the device of ``world``; rank 0 calls it, so that all ranks agree."""
    hidden_size = architecture(base_folder(model)).get("hidden_size", 0)
    return choose_precision(model, train, world.device, int(hidden_size))


def load_run_policy(configs: Configs, weights: Path | None, precision: Precision, world: World) -> Policy:
    """Load the policy; without its weights if ``split_policy`` has each rank read its own part."""
    train, is_shared = configs[TrainConfig], world.size > 1
    policy = load_policy(configs[ModelConfig], weights, configs[AdapterConfig], precision, is_empty=is_shared)
    # Merge it for the other ways: they send whole weights.
    may_publish_adapter = policy.adapter is not None and train.weight_sync == "disk"
    policy = replace(policy, publishes_adapter=may_publish_adapter and train.publish in ("auto", "adapter"))
    if policy.publishes_adapter:
        logger.info("versions hold the adapter alone; an engine that loads none merges it (--publish)")
    if policy.pixels is not None and is_shared:
        raise ConfigError(
            f"a vision model in {world.size} processes: images are trained in one",
            hint="train with one process",
        )
    if not is_shared:
        policy.model.to(world.device)  # type: ignore[arg-type]
    check_model(policy.model)
    return policy


def split_policy(
    policy: Policy,
    layout: Layout,
    configs: Configs,
    precision: Precision,
    world: World,
    runs: type[ParallelModel] = ParallelModel,
    new: Collection[str] = (),
) -> ParallelModel:
    """Return the policy's model, split and sharded over the ranks, with its weights.

    ``runs`` is what runs it; tensors ``new`` are in no file, and left undefined.
    """
    is_mixed = precision.policy is not None
    if is_mixed:
        join_alone(world.device)
    model = parallelize(
        policy.model,
        build_mesh(layout, world.device.type, single=is_mixed),
        max_tokens=configs[TrainConfig].max_tokens,
        reduction=configs[MemoryConfig].gradient_reduction,
        precision=precision,
        runs=runs,
    )
    if world.size > 1:
        load_shards(policy.model, policy.source or policy.base, world.device, configs[ModelConfig], new)
    return model.to(world.device)


def build_replay(config: ModelConfig, memory: MemoryConfig, policy: Policy) -> RouterReplay | None:
    """Let the routers of ``policy`` replay an engine's choices; None without a mixture, or where they cannot.

    Raises ModelError or ConfigError where ``--router_replay on`` demands it and the model or a flag prevents.
    """
    shape = replayed_experts(config, str(policy.base))
    if shape is None:
        return None
    try:
        if memory.torch_compile:
            raise ConfigError("--torch_compile: compiled layers choose their experts themselves")
        check_replay(policy.model, shape)
        return RouterReplay.install(policy.model, shape)
    except (ConfigError, ModelError) as error:
        if config.router_replay == "on":
            raise
        logger.warning("the engine's choices of experts are not replayed: %s", error.message)
        return None


def compile_layers(model: Any) -> None:
    """Compile each decoder layer for any number of tokens, without the attention over a forest.

    Raises ConfigError for a model whose decoder has no list of layers.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise ConfigError(
            f"the decoder of {type(model).__name__} has no list of layers to compile",
            hint="leave out --torch_compile",
        )
    # Torch's cache does not tell vector widths apart: kernels for another one crash, or give wrong gradients.
    torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()
    for layer in layers:
        layer.compile(dynamic=True)


def forward_options(train: TrainConfig, memory: MemoryConfig) -> ForwardOptions:
    """Return how a forward computes logprobs with these flags."""
    return ForwardOptions(
        chunk_size=train.loss_seq_chunk_size,
        vocab_chunk_size=memory.loss_vocab_chunk_size or DEFAULT_VOCAB_CHUNK,
    )


def pack_forests(
    policy: Policy,
    model: ParallelModel,
    replay: RouterReplay | None,
    data: Sequence[DBRecordData],
    *,
    max_tokens: int,
    merging: PrefixMerging,
    ages: Mapping[int, int] | None = None,
    images: Mapping[str, Image] = MappingProxyType({}),
) -> list[TokenForest]:
    """Plan the micro-batches of ``data`` over all ranks of ``model``, and return this rank's.

    Raises ForestError for an image that is not in ``images``, and as ``build_micro_batches``.
    """
    mesh, own = model.mesh, policy.model
    planned = build_micro_batches(
        data, max_tokens, vocab_size=own.config.get_text_config().vocab_size, merging=merging,
        ranks=mesh.layout.data, fill=CPU_FILL if own.device.type == "cpu" else None, ages=ages,
        rows=model.executor.rows, experts=None if replay is None else replay.shape,
    )  # fmt: skip
    # Take every n-th: the planner makes the micro-batches of one round close in size.
    chosen = planned[mesh.data_rank :: mesh.layout.data]
    return [attach_pixels(forest, policy.pixels, images) for forest in chosen]
