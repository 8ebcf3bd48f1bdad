"""Memory flags against the plain step: the same loss and gradients, and errors that name what helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peak_memory import peak_allocated
from tiny_models import chains, packed, tiny_model
from tiny_trainer import tiny_trainer

from agentrl.config.schema import OptimConfig
from agentrl.config.training import MemoryConfig
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.errors import ConfigError, TrainingError
from agentrl.losses.settings import LossSettings
from agentrl.train.build import Checkpointing, checkpointing_mode, enable_checkpointing
from agentrl.train.optimizer import OffloadedAdamW, build_optimizer
from agentrl.train.step import explain_out_of_memory, forward_backward


def step(model: Any) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of one step on a few chains."""
    metrics = forward_backward(ParallelModel(model), [packed(chains())], LossSettings())
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return metrics["loss"], gradients


@pytest.mark.exactness
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputing_changes_neither_loss_nor_gradients(mode: Checkpointing) -> None:
    expected = step(tiny_model("llama"))
    model = tiny_model("llama")
    enable_checkpointing(model, mode)
    torch.testing.assert_close(step(model), expected, rtol=1e-6, atol=1e-7)


def test_what_is_recomputed_is_not_kept() -> None:
    peaks = {}
    for mode in ("none", "selective", "full"):
        model = tiny_model("llama", num_hidden_layers=8, intermediate_size=256)
        enable_checkpointing(model, mode)
        step(model)
        peaks[mode] = peak_allocated(lambda model=model: step(model))
    assert peaks["full"] < peaks["selective"] < peaks["none"]


@pytest.mark.exactness
@pytest.mark.parametrize("fused", [False, True])
def test_an_offloaded_optimizer_makes_the_same_weights(fused: bool) -> None:
    models = [tiny_model("llama"), tiny_model("llama")]
    optimizers = [
        build_optimizer(
            model,
            OptimConfig(learning_rate=1e-2, weight_decay=0.1),
            MemoryConfig(optimizer_offload=offload, fused_adamw=fused),
        )
        for model, offload in zip(models, (False, True), strict=True)
    ]
    assert isinstance(optimizers[1], OffloadedAdamW)
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            forward_backward(ParallelModel(model), [packed(chains())], LossSettings())
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, *(model.parameters() for model in models)))
    assert len(optimizers[1].param_groups) == len(optimizers[0].param_groups)


@pytest.mark.exactness
def test_one_kernel_for_all_parameters_makes_the_same_weights() -> None:
    models = [tiny_model("llama"), tiny_model("llama")]
    for model, fused in zip(models, (False, True), strict=True):
        optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-2), MemoryConfig(fused_adamw=fused))
        forward_backward(ParallelModel(model), [packed(chains())], LossSettings())
        optimizer.step()
    for plain, fused_weights in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(plain, fused_weights, rtol=1e-6, atol=1e-7)


def test_the_original_flag_means_full() -> None:
    assert checkpointing_mode(MemoryConfig(), False) == "none"
    assert checkpointing_mode(MemoryConfig(), True) == "full"
    assert checkpointing_mode(MemoryConfig(activation_checkpointing="selective"), False) == "selective"
    with pytest.raises(ConfigError, match="means full"):
        checkpointing_mode(MemoryConfig(activation_checkpointing="selective"), True)
    with pytest.raises(ConfigError, match="only what full saves"):
        checkpointing_mode(MemoryConfig(activation_offload=True), False)


def test_a_cpu_keeps_what_would_be_moved(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_trainer(base, activation_checkpointing="full", activation_offload=True)
    forward_backward(ParallelModel(trainer.policy.model), [packed(chains())], LossSettings())
    assert "a CPU keeps activations in the host's memory anyway" in caplog.text


def test_a_model_that_cannot_recompute_is_refused() -> None:
    model = tiny_model("llama")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match="cannot recompute"):
        enable_checkpointing(model)


@pytest.mark.parametrize(
    ("error", "mode", "first"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "none", "selective"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried …"), "selective", "full"),
        (MemoryError(), "full", "--activation_offload"),
    ],
)
def test_out_of_memory_names_the_flags(error: Exception, mode: Checkpointing, first: str) -> None:
    with (
        pytest.raises(TrainingError, match="out of memory") as raised,
        explain_out_of_memory(MemoryConfig(activation_checkpointing=mode), 8192),
    ):
        raise error
    assert first in raised.value.hint.split(";")[0]
    assert "--max_tokens (to 4096" in raised.value.hint


def test_several_ranks_may_shard_the_gradients() -> None:
    for ranks in (2, 1):
        with pytest.raises(TrainingError) as raised, explain_out_of_memory(MemoryConfig(), 8192, ranks=ranks):
            raise MemoryError
        assert ("--gradient_reduction every" in raised.value.hint) is (ranks > 1)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shape"), explain_out_of_memory(MemoryConfig(), 8192):
        raise RuntimeError("shape mismatch")
