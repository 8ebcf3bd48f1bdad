"""Build a PolicyTrainer: model, layout, recomputed or compiled layers, optimizer, reference and loss."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from agentrl.config.load import Configs
from agentrl.config.schema import (
    AdapterConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from agentrl.distributed.load_shards import load_shards
from agentrl.distributed.mesh import (
    Layout,
    Mesh,
    World,
    build_mesh,
    check_flags,
    join_alone,
    plan_layout,
    single_process,
)
from agentrl.distributed.parallel_model import ParallelModel, parallelize
from agentrl.documents.training import BYTES_PER_TOKEN
from agentrl.errors import ConfigError, ModelError
from agentrl.losses.settings import LossSettings
from agentrl.model.check_model import check_model, check_replay
from agentrl.model.flops import Precision, choose_precision, device_peak
from agentrl.model.load import Policy, disable_dropout, empty_model, load_model, load_policy
from agentrl.model.logprobs import DEFAULT_CHUNK, DEFAULT_VOCAB_CHUNK, ForwardOptions
from agentrl.model.routing import RouterReplay
from agentrl.train.optimizer import build_optimizer, build_scheduler, freeze
from agentrl.train.step import FrozenLogprobs, PolicyTrainer, Reference
from agentrl.weights.folder import architecture, base_folder, replayed_experts

logger = logging.getLogger(__name__)

Checkpointing = Literal["none", "full", "selective"]
_aten = torch.ops.aten
_KEPT = frozenset({
    _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention, torch.ops.higher_order.inductor_compiled_code,
})  # fmt: skip
"""Operations whose results ``selective`` keeps: the most expensive ones to recompute.

Compiled FlexAttention is ``inductor_compiled_code``. What it saves for its backward is kept with its result:
queries and keys too.
"""


def step_precision(model: ModelConfig, train: TrainConfig, world: World) -> Precision:
    """Return ``choose_precision`` on the device of ``world``; rank 0 calls it, so that all ranks agree."""
    hidden_size = architecture(base_folder(model)).get("hidden_size", 0)
    return choose_precision(model, train, world.device, int(hidden_size))


def build_trainer(
    configs: Configs,
    *,
    weights: Path | None,
    total_steps: int | None,
    world: World | None = None,
    precision: Precision | None = None,
) -> PolicyTrainer:
    """Load the model and build what trains it. Every rank of ``world`` calls it; default: a single process.

    ``weights`` is a checkpoint's model folder, loaded in place of the base model's weights. ``total_steps``
    is the end of a decaying schedule. ``precision`` is by default ``step_precision``, in a single process.
    Raises ModelError and ConfigError.
    """
    world = world or single_process()
    flags, optim = configs[ModelConfig], configs[OptimConfig]
    train, memory = configs[TrainConfig], configs[MemoryConfig]
    precision = precision or step_precision(flags, train, world)
    settings = LossSettings.of_run(configs)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if world.size == 1 and launched > 1:
        raise ConfigError(
            f"{launched} processes were launched, and this command runs in a single one",
            hint="launch it with one process; `agentrl train` and `agentrl sft` take several",
        )
    layout = plan_layout(train, world.size)
    check_flags(layout, configs[AdapterConfig], memory)
    # Seed every rank alike: each draws the first numbers of the adapters, and keeps its shard of them.
    set_seed(configs[RunConfig].seed)
    policy = _load_policy(configs, weights, precision, world)
    replay = build_replay(flags, memory, policy)
    mode = checkpointing_mode(memory, train.gradient_checkpointing)
    on_host = world.device.type == "cpu"
    if memory.activation_offload and on_host:  # transformers would pin memory, which needs an accelerator
        logger.warning("--activation_offload true: a CPU keeps activations in the host's memory anyway")
    enable_checkpointing(policy.model, mode, offload=memory.activation_offload and not on_host)
    if memory.torch_compile:
        compile_layers(policy.model)
    # Freeze before the split: how gradients are reduced depends on the bytes that are trained.
    freeze(policy.model, optim.freeze)
    model = _split(policy, layout, configs, precision, world)
    # Build it after the split, which puts other parameters in place of the model's.
    optimizer = build_optimizer(policy.model, optim, memory)
    scheduler = build_scheduler(optimizer, optim, total_steps)
    reference = build_reference(
        settings, flags, policy, model.mesh, world.device, precision.products, max_tokens=train.max_tokens
    )
    updates = optim.num_epochs_per_batch * optim.mini_batches
    return PolicyTrainer(
        policy=policy,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        settings=settings,
        options=ForwardOptions(
            chunk_size=train.loss_seq_chunk_size or DEFAULT_CHUNK,
            vocab_chunk_size=memory.loss_vocab_chunk_size or DEFAULT_VOCAB_CHUNK,
        ),
        max_tokens=train.max_tokens,
        prefix_merging=train.prefix_merging,
        max_grad_norm=optim.max_grad_norm,
        frozen=FrozenLogprobs(start=updates > 1 and settings.old_logprobs != "behavior", reference=reference),
        epochs=optim.num_epochs_per_batch,
        mini_batches=optim.mini_batches,
        memory=replace(memory, activation_checkpointing=mode),
        peak=device_peak(world.device, precision.products),
        recorded_tokens=int(train.token_statistics_mib * 2**20) // BYTES_PER_TOKEN,
        replay=replay,
    )


def _load_policy(configs: Configs, weights: Path | None, precision: Precision, world: World) -> Policy:
    """Load the policy; without its weights if ``_split`` has each rank read its own part."""
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


def _split(
    policy: Policy, layout: Layout, configs: Configs, precision: Precision, world: World
) -> ParallelModel:
    """Return the policy's model, split and sharded over the ranks, with its weights."""
    is_mixed = precision.policy is not None
    if is_mixed:
        join_alone(world.device)
    model = parallelize(
        policy.model,
        build_mesh(layout, world.device.type, single=is_mixed),
        max_tokens=configs[TrainConfig].max_tokens,
        reduction=configs[MemoryConfig].gradient_reduction,
        precision=precision,
    )
    if world.size > 1:
        load_shards(policy.model, policy.source or policy.base, world.device, configs[ModelConfig])
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


def build_reference(
    loss: LossSettings,
    config: ModelConfig,
    policy: Policy,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_tokens: int,
) -> Reference | None:
    """Return the reference model that the loss reads: ``--reference_model`` or the run's base model.

    Its weights are held in ``dtype``, that of the policy's products, and split and sharded like the policy's.
    A policy with an adapter contains its base model. Raises ModelError for a folder that is not a model, or
    for a model with another vocabulary, and ConfigError for one that the policy's layout cannot split.
    """
    if not loss.needs_reference:
        return None
    if config.reference_model is None and policy.adapter is not None:
        return Reference(adapter=policy.adapter)
    folder = Path(config.reference_model or policy.base)
    base_folder(replace(config, model_name_or_path=str(folder)))
    is_shared = mesh.layout.world > 1
    model = (empty_model if is_shared else load_model)(folder, config, dtype)
    expected, found = (
        cast(nn.Embedding, item.get_input_embeddings()).num_embeddings for item in (policy.model, model)
    )
    if found != expected:
        raise ModelError(
            f"--reference_model {folder} has {found} token ids, and the policy {expected}",
            hint="give a model with the policy's tokenizer",
        )
    disable_dropout(model)
    check_model(model)
    # Freeze before the split: FSDP2 then frees the gathered root after each forward.
    model.requires_grad_(requires_grad=False)
    try:
        parallel = parallelize(model, mesh, max_tokens=max_tokens)
    except ConfigError as error:
        raise ConfigError(
            f"--reference_model {folder} is split like the policy: {error.message}", hint=error.hint
        ) from error
    if is_shared:
        load_shards(model, folder, device, config)
    logger.info("the reference model of %s is %s", loss.loss_calculater, folder)
    return Reference(parallel.to(device))


def checkpointing_mode(config: MemoryConfig, gradient_checkpointing: bool) -> Checkpointing:
    """Return the mode that ``--activation_checkpointing`` and ``--gradient_checkpointing`` set together.

    Raises ConfigError if they contradict each other, and for ``--activation_offload`` without mode ``full``.
    """
    mode = config.activation_checkpointing
    if gradient_checkpointing and mode == "none":
        mode = "full"
    if gradient_checkpointing and mode != "full":
        raise ConfigError(
            f"--gradient_checkpointing true means full, and --activation_checkpointing is {mode}",
            hint="leave out --gradient_checkpointing",
        )
    if config.activation_offload and mode != "full":
        raise ConfigError(
            f"--activation_offload with --activation_checkpointing {mode}: only what full saves is moved",
            hint="set --activation_checkpointing full",
        )
    return mode


def enable_checkpointing(model: Any, mode: Checkpointing = "full", *, offload: bool = False) -> None:
    """Recompute activations in the backward instead of keeping them.

    ``full`` keeps the input of each decoder layer (with ``offload`` in the host's memory). ``selective`` also
    keeps the results of matrix products and of attention. Raises ConfigError for a model that cannot.
    """
    if mode == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"{type(model).__name__} cannot recompute its activations",
            hint="leave out --activation_checkpointing and --gradient_checkpointing",
        )
    # Choose this variant: torch takes a ``context_fn`` with no other.
    arguments: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.activation_checkpointing_enable(arguments, offload=offload)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


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
