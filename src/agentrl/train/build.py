"""Build a PolicyTrainer: model, layout, recomputed or compiled layers, optimizer, reference and loss."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig

from agentrl.chat.model_folder import context_length
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AdapterConfig,
    CriticConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from agentrl.distributed.build_policy import (
    build_replay,
    compile_layers,
    forward_options,
    load_run_policy,
    split_policy,
    step_precision,
)
from agentrl.distributed.load_shards import load_shards
from agentrl.distributed.mesh import Layout, Mesh, World, check_flags, plan_layout, single_process
from agentrl.distributed.parallel_model import ParallelModel, parallelize
from agentrl.documents.training import BYTES_PER_TOKEN
from agentrl.errors import ConfigError, ModelError
from agentrl.losses.settings import LossSettings
from agentrl.model.check_model import check_model
from agentrl.model.flops import Precision, device_peak
from agentrl.model.load import (
    Policy,
    disable_dropout,
    empty_model,
    load_model,
    load_policy,
    load_tokenizer,
    placeholders,
)
from agentrl.model.lora import add_adapter
from agentrl.model.norms import fuse_norms
from agentrl.model.value_head import build_head
from agentrl.train.critic import Critic, critic_module
from agentrl.train.optimizer import build_optimizer, build_scheduler, freeze
from agentrl.train.step import FrozenLogprobs, PolicyTrainer, Reference
from agentrl.weights.folder import base_folder

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


def build_trainer(
    configs: Configs,
    *,
    weights: Path | None,
    total_steps: int | None,
    world: World | None = None,
    precision: Precision | None = None,
    load: Callable[..., Policy] = load_run_policy,
    split: Callable[..., ParallelModel] = split_policy,
    trains: Callable[..., PolicyTrainer] = PolicyTrainer,
) -> PolicyTrainer:
    """Load the model and build what trains it. Every rank of ``world`` calls it; default: a single process.

    ``weights`` is a checkpoint's model folder, loaded in place of the base model's weights. ``total_steps``
    is the end of a decaying schedule. ``precision`` is by default ``step_precision``, in a single process.
    ``load``, ``split`` and ``trains`` are those of another model than a policy.
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
    check_critic(configs, layout)
    # Seed every rank alike: each draws the first numbers of the adapters, and keeps its shard of them.
    set_seed(configs[RunConfig].seed)
    policy = load(configs, weights, precision, world)
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
    model = split(policy, layout, configs, precision, world)
    # Build it after the split, which puts other parameters in place of the model's.
    optimizer = build_optimizer(policy.model, optim, memory)
    warmup = configs[CriticConfig].critic_warmup_steps
    scheduler = build_scheduler(
        optimizer, optim, None if total_steps is None else max(1, total_steps - warmup)
    )
    reference = build_reference(
        settings, flags, policy, model.mesh, world.device, precision.products, max_tokens=train.max_tokens
    )
    updates = optim.num_epochs_per_batch * optim.mini_batches
    return trains(
        policy=policy,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        settings=settings,
        options=forward_options(train, memory),
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
        critic=build_critic(configs, policy, model.mesh, world, precision, total_steps),
    )


def require_buildable(configs: Configs, world: World) -> None:
    """Raise ModelError or ConfigError for flags that ``build_trainer`` refuses. Reads no weights.

    Call it before a run is begun.
    """
    adapter, memory, train = configs[AdapterConfig], configs[MemoryConfig], configs[TrainConfig]
    flags, optim = configs[ModelConfig], configs[OptimConfig]
    layout = plan_layout(train, world.size)
    check_flags(layout, adapter, memory)
    check_critic(configs, layout)
    checkpointing_mode(memory, train.gradient_checkpointing)
    load_tokenizer(flags, base_folder(flags))
    context_length(flags, base_folder(flags))
    if configs[CriticConfig].is_on:
        _check_critic_model(configs)
    if flags.reference_model is not None and LossSettings.of_run(configs).needs_reference:
        base_folder(replace(flags, model_name_or_path=flags.reference_model))
    if train.max_steps > 0:  # else the tasks say how many steps there are
        nothing = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        build_scheduler(nothing, optim, train.max_steps)
    if adapter.lora_rank or optim.freeze is not None:
        freeze(load_policy(flags, adapter=adapter, is_empty=True).model, optim.freeze)


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
    require_vocabulary(policy, model, f"--reference_model {folder}")
    disable_dropout(model)
    fuse_norms(model)
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


def build_critic(
    configs: Configs, policy: Policy, mesh: Mesh, world: World, precision: Precision, total_steps: int | None
) -> Critic | None:
    """Return the critic of ``--critic``; None without one.

    A model of its own is loaded, split, sharded and recomputed like the policy, and has adapters if that has.
    Raises ConfigError for a head that cannot be used, and ModelError for a folder that is not a model or
    a model with another vocabulary.
    """
    config, optim, memory = configs[CriticConfig], configs[OptimConfig], configs[MemoryConfig]
    if not config.is_on:
        return None
    _require_policy_steps(config, total_steps, "the number of tasks")
    trunk, owner = None, policy.model
    if config.critic == "model":
        trunk = _critic_trunk(configs, policy, mesh, world, precision)
        owner = trunk.model
    hidden_size = int(owner.config.get_text_config().hidden_size)
    head = build_head(config.critic_head, hidden_size, world.device, configs[RunConfig].seed)
    # AdamW moves each weight by the rate, and a value by the rate times the sum of a hidden state's sizes.
    usual = 1e-5 if trunk is not None else 0.1 / hidden_size
    own = replace(optim, learning_rate=config.critic_learning_rate or usual)
    optimizer = build_optimizer(critic_module(head, trunk), own, memory)
    return Critic(
        config=config,
        head=head,
        trunk=trunk,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, own, total_steps),
        whitens=configs[TrainConfig].advantage_whitening == "batch",
        max_grad_norm=optim.max_grad_norm,
    )


def _critic_trunk(
    configs: Configs, policy: Policy, mesh: Mesh, world: World, precision: Precision
) -> ParallelModel:
    """Return the critic's own model, split and sharded like the policy's; its output head is not trained."""
    flags, adapter, memory = configs[ModelConfig], configs[AdapterConfig], configs[MemoryConfig]
    folder = Path(configs[CriticConfig].critic_model or policy.base)
    if policy.pixels is not None:
        raise ConfigError(
            "--critic model with a vision model: the critic reads no images", hint="set --critic head"
        )
    base_folder(replace(flags, model_name_or_path=str(folder)))
    is_shared, is_adapted = world.size > 1, adapter.lora_rank > 0
    dtype = precision.products if is_adapted else precision.weights
    model: Any = (empty_model if is_shared else load_model)(folder, flags, dtype)
    require_vocabulary(policy, model, f"--critic_model {folder}")
    disable_dropout(model)
    fuse_norms(model)
    check_model(model)
    if is_adapted:
        with placeholders(model) if is_shared else contextlib.nullcontext():
            add_adapter(model, adapter, folder, None)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if output is not embedding:  # nothing reads it
        output.requires_grad_(requires_grad=False)
    if not is_shared:
        model.to(world.device)
    enable_checkpointing(
        model, checkpointing_mode(memory, configs[TrainConfig].gradient_checkpointing),
        offload=memory.activation_offload and world.device.type != "cpu",
    )  # fmt: skip
    if memory.torch_compile:
        compile_layers(model)
    try:
        parallel = parallelize(
            model, mesh, max_tokens=configs[TrainConfig].max_tokens, reduction=memory.gradient_reduction,
            precision=precision,
        )  # fmt: skip
    except ConfigError as error:
        raise ConfigError(
            f"--critic_model {folder} is split like the policy: {error.message}", hint=error.hint
        ) from error
    if is_shared:
        load_shards(model, folder, world.device, flags)
    logger.info("the critic begins from %s", folder)
    return parallel.to(world.device)


def require_vocabulary(policy: Policy, model: Any, what: str) -> None:
    """Raise ModelError if ``model``, which the flag ``what`` gives, embeds other ids than the policy."""
    expected, found = (
        cast(nn.Embedding, item.get_input_embeddings()).num_embeddings for item in (policy.model, model)
    )
    if found != expected:
        raise ModelError(
            f"{what} has {found} token ids, and the policy {expected}",
            hint="give a model with the policy's tokenizer",
        )


def check_critic(configs: Configs, layout: Layout) -> None:
    """Raise ConfigError for a critic that the layout cannot train, and for a warm-up without an end."""
    config, steps = configs[CriticConfig], configs[TrainConfig].max_steps
    if config.is_on and layout.pp > 1:
        raise ConfigError(
            f"--critic {config.critic} with --pp_size {layout.pp}: the last stage alone would train it",
            hint="set --pp_size 1: FSDP2 shards the layers over those processes too",
        )
    if config.is_on and steps > 0:
        _require_policy_steps(config, steps, "--max_steps")


def _require_policy_steps(config: CriticConfig, steps: int | None, limit: str) -> None:
    """Raise ConfigError for a warm-up as long as the run, whose ``steps`` are those of ``limit``."""
    if steps is not None and steps <= config.critic_warmup_steps:
        raise ConfigError(
            f"--critic_warmup_steps {config.critic_warmup_steps} in a run of {steps} steps, by {limit}: the"
            " policy would never be trained",
            hint="lower --critic_warmup_steps, or raise --max_steps or --num_train_epochs",
        )


def _check_critic_model(configs: Configs) -> None:
    """Raise ModelError or ConfigError for a critic that ``build_critic`` refuses. Reads no weights."""
    config, flags = configs[CriticConfig], configs[ModelConfig]
    policy = folder = base_folder(flags)
    if config.critic == "model" and config.critic_model is not None:
        folder = base_folder(replace(flags, model_name_or_path=config.critic_model))
    expected, found = (
        AutoConfig.from_pretrained(str(each), trust_remote_code=flags.trust_remote_code).get_text_config()
        for each in (policy, folder)
    )
    if found.vocab_size != expected.vocab_size:
        raise ModelError(
            f"--critic_model {folder} has {found.vocab_size} token ids, and the policy {expected.vocab_size}",
            hint="give a model with the policy's tokenizer",
        )
    build_head(config.critic_head, int(found.hidden_size), torch.device("cpu"), seed=0)


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
