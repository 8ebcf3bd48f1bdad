"""Recompute activations, compile layers, and name the flags that help when a step runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from agentrl.config.training import MemoryConfig
from agentrl.errors import ConfigError, TrainingError

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


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA out of memory", "out of memory")


@contextmanager
def explain_out_of_memory(config: MemoryConfig, max_tokens: int, *, ranks: int = 1) -> Iterator[None]:
    """Raise a TrainingError that names the flags that would help, if the block runs out of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in _OUT_OF_MEMORY):
            raise
        raise TrainingError(
            f"out of memory with micro-batches of --max_tokens {max_tokens}: {_first_line(error)}",
            hint="; or ".join(_remedies(config, max_tokens, ranks)),
        ) from error


def _remedies(config: MemoryConfig, max_tokens: int, ranks: int) -> Sequence[str]:
    remedies, mode = [], config.activation_checkpointing
    if mode == "none":
        remedies.append("set --activation_checkpointing selective, or full, which keeps less")
    elif mode == "selective":
        remedies.append("set --activation_checkpointing full")
    elif not config.activation_offload:
        remedies.append("set --activation_offload true")
    if config.gradient_reduction != "every" and ranks > 1:
        remedies.append("set --gradient_reduction every")
    remedies.append(f"lower --max_tokens (to {max_tokens // 2}, but not below the longest trajectory)")
    if not config.optimizer_offload:
        remedies.append("set --optimizer_offload true")
    remedies.append("shard the model over more devices")
    return remedies


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
