"""One optimizer step on one step's data: forests, forward and backward, clipping, AdamW."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LRScheduler

from agentrl.batching.forest import TokenForest
from agentrl.batching.planner import PrefixMerging, build_micro_batches
from agentrl.documents.training import DBRecordData
from agentrl.losses.settings import LossSettings
from agentrl.train.model import Policy
from agentrl.train.step import ForwardOptions, forward_backward


@dataclass(frozen=True)
class StepResult:
    """``is_finite``: loss and gradient norm are finite, and the optimizer has stepped."""

    metrics: dict[str, Any]
    is_finite: bool


@dataclass(frozen=True, kw_only=True)
class StepComputer:
    """Everything that computes; it knows neither the database nor the disk."""

    accelerator: Accelerator
    policy: Policy
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    settings: LossSettings
    options: ForwardOptions
    max_tokens: int
    prefix_merging: PrefixMerging
    max_grad_norm: float

    def train(self, data: Sequence[DBRecordData], version: int) -> StepResult:
        """Pack ``data`` into forests and step on them; blocking, made for a worker thread."""
        vocabulary = self.policy.model.config.get_text_config().vocab_size
        forests = build_micro_batches(
            data, self.max_tokens, vocab_size=vocabulary, merging=self.prefix_merging
        )
        return self.train_forests(forests, version)

    def train_forests(self, forests: Sequence[TokenForest], version: int) -> StepResult:
        """One step over all ``forests``; weights stay as they are where loss or gradient is not finite."""
        started = time.perf_counter()
        model = self.policy.model
        model.train()
        metrics = forward_backward(
            model,
            forests,
            self.settings,
            current_version=version,
            options=self.options,
            backward=self.accelerator.backward,
        )
        computed = time.perf_counter()
        grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm))
        is_finite = math.isfinite(metrics["loss"]) and math.isfinite(grad_norm)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        if is_finite:
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        ended = time.perf_counter()
        metrics |= {
            "grad_norm": grad_norm,
            "lr": learning_rate,
            "seconds_forward_backward": computed - started,
            "seconds_optimizer": ended - computed,
            "tokens_per_second": metrics["tokens"] / max(ended - started, 1e-9),
        }
        return StepResult(metrics, is_finite)
