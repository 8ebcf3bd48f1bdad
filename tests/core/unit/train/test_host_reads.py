"""That the host reads no value of the device between the micro-batches of an update.

On the ``meta`` device tensors have no values: reading one, or selecting by a mask, raises an error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import AGES, VOCABULARY, chains, tiny_model, tree
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.data.forest import TokenForest
from agentrl.data.planner import build_micro_batches
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.losses.settings import LossSettings
from agentrl.model import attention
from agentrl.model.logprobs import ForwardOptions
from agentrl.train.step import StepLoss, TokenRecorder, TrajectorySums, count_step

META = torch.device("meta")
DATA = [*chains(0, 4), tree(1)]


def forests() -> list[TokenForest]:
    """Micro-batches that hold parts of a trajectory, and one that trains nothing."""
    return build_micro_batches(DATA, 24, vocab_size=VOCABULARY, ages=AGES, ranks=3)


def add_gradients(
    settings: LossSettings, executor: str = "auto", device: torch.device = META, *, parts: bool = False
) -> StepLoss:
    """Run the micro-batches of an update."""
    model = tiny_model("qwen3", hidden_size=64, head_dim=16).to(device)
    batches = forests()
    sums = TrajectorySums(*torch.zeros(4, len(DATA), dtype=torch.float64, device=device))
    loss = StepLoss(
        settings,
        count_step(batches),
        sum(forest.tokens for forest in batches),
        sums if parts else None,
        TokenRecorder(DATA, [item.id for item in DATA], device),
        sums.compared(DATA) if settings.loss.compares else None,
    )
    options = ForwardOptions(entropy_gradient=settings.entropy_coef > 0)
    parallel = ParallelModel(model, executor=executor)
    for forest, values in parallel.micro_batches(batches, options):
        torch.autograd.backward(loss.add(forest, *values))
    assert all(parameter.grad is not None for parameter in model.parameters())
    return loss


def test_a_read_is_noticed() -> None:
    loss = add_gradients(LossSettings())
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        loss.report()


@pytest.mark.parametrize(
    "flags",
    [
        {"loss_calculater": "GRPO", "importance_correction": "icepop,token_mask"},
        {"loss_calculater": "GSPO", "importance_correction": "seq_mask,seq_kl"},
        {"loss_calculater": "CISPO", "entropy_coef": 0.1},
        {"loss_calculater": "MINIRL", "old_logprobs": "recompute", "importance_correction": "tis"},
        {"loss_calculater": "CrossEntropy"},
        {"loss_calculater": "KTO"},
    ],
    ids=lambda flags: str(flags["loss_calculater"]),
)
def test_no_loss_reads_a_value(flags: dict[str, Any]) -> None:
    settings = LossSettings(**flags)
    add_gradients(settings, parts=settings.reads_trajectory)


@pytest.mark.parametrize("executor", ["sdpa", "varlen"])
def test_no_executor_reads_a_value(executor: str) -> None:
    add_gradients(LossSettings(), executor)


class Reads(TorchDispatchMode):
    """Counts the values of tensors that the host reads one by one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def test_sequences_that_run_alone_take_one_read_a_micro_batch() -> None:
    """``transformers`` compares the positions when it makes their mask."""
    with Reads() as reads:
        loss = add_gradients(LossSettings(), "per_sequence_padded", torch.device("cpu"))
        loss.report()
    assert 0 < reads.count <= len(forests())


def test_flex_attention_reads_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention, "_kernel", lambda device_type: torch_flex.flex_attention)
    add_gradients(LossSettings(), "flex")
