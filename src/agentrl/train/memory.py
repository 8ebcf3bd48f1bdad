"""Memory of a step: what is recomputed or kept on the host, and which flags help when it runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
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
})  # fmt: skip
"""Operations whose results ``selective`` keeps: the ones that cost the most to do again."""


def checkpointing_mode(config: MemoryConfig, gradient_checkpointing: bool) -> Checkpointing:
    """What ``--activation_checkpointing`` and the original's ``--gradient_checkpointing`` ask for together.

    Raises ConfigError where they disagree, and for an offload of activations that nothing checkpoints.
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

    ``full`` keeps the input of each decoder layer (``offload``: in the host's memory), ``selective`` also the
    results of its matrix products and of its attention. Raises ConfigError where a model cannot.
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
    """Compile each decoder layer for any number of tokens; attention over a forest stays as it is.

    Raises ConfigError for a model whose decoder has no list of layers.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise ConfigError(
            f"the decoder of {type(model).__name__} has no list of layers to compile",
            hint="leave out --torch_compile",
        )
    for layer in layers:
        layer.compile(dynamic=True)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments live in the host's memory; a device holds those of one parameter at a time.

    The arithmetic is the device's own, so weights are those of AdamW bit by bit. Moves 16 bytes per float32
    parameter and step in each direction.
    """

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; ``closure`` computes the loss first, where it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.param_groups = [{**group, "params": [parameter]}]
                        self._step_on_device(parameter)
        finally:
            self.param_groups = groups
        return loss

    def _step_on_device(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        self._move(state, parameter, parameter.device)
        super().step()
        self._move(state, parameter, torch.device("cpu"))

    @staticmethod
    def _move(state: dict[str, Any], parameter: Tensor, device: torch.device) -> None:
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = value.to(device)


_FULL = ("can't allocate memory", "not enough memory", "CUDA out of memory", "out of memory")


@contextmanager
def naming_the_knobs(config: MemoryConfig, max_tokens: int) -> Iterator[None]:
    """Turn running out of memory into a TrainingError that names the flags that would have helped."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in _FULL):
            raise
        raise TrainingError(
            f"out of memory with micro-batches of --max_tokens {max_tokens}: {_first_line(error)}",
            hint="; or ".join(_knobs(config, max_tokens)),
        ) from error


def _knobs(config: MemoryConfig, max_tokens: int) -> Sequence[str]:
    knobs, mode = [], config.activation_checkpointing
    if mode == "none":
        knobs.append("set --activation_checkpointing selective, or full, which keeps less")
    elif mode == "selective":
        knobs.append("set --activation_checkpointing full")
    elif not config.activation_offload:
        knobs.append("set --activation_offload true")
    if config.gradient_reduction == "last" and dist.is_initialized():
        knobs.append("set --gradient_reduction every")
    knobs.append(f"lower --max_tokens (to {max_tokens // 2}, but not below the longest trajectory)")
    if not config.optimizer_offload:
        knobs.append("set --optimizer_offload true")
    knobs.append("set --autocast_bf16 true, or shard the model over more devices")
    return knobs


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
