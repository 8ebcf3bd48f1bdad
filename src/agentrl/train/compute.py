"""One optimizer step on one step's data: forests, forward and backward, clipping, AdamW."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from agentrl.config.training import MemoryConfig
from agentrl.data.forest import TokenForest
from agentrl.data.planner import CPU_FILL, PrefixMerging, build_micro_batches
from agentrl.documents.training import DBRecordData
from agentrl.losses.settings import LossSettings
from agentrl.model.load import Policy
from agentrl.train.clock import Stopwatch, peak_flops
from agentrl.train.memory import naming_the_knobs
from agentrl.train.optimizer_state import save_optimizer
from agentrl.train.reference import FrozenLogprobs
from agentrl.train.step import ForwardOptions, each_logprobs, forward_backward
from agentrl.train.throughput import ModelShape, StepSeconds, call_tokens, sharing_metrics, step_metrics
from agentrl.train.updates import join_metrics, split_updates
from agentrl.weights.model_folder import SavableModel

if TYPE_CHECKING:
    from agentrl.distributed.fsdp import Parallel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """``is_finite``: loss and gradient norm are finite, and the optimizer has stepped."""

    metrics: dict[str, Any]
    is_finite: bool


@dataclass(frozen=True, kw_only=True)
class PolicyTrainer:
    """Everything that computes; it knows neither the database nor the disk."""

    device: torch.device
    policy: Policy
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    settings: LossSettings
    options: ForwardOptions
    max_tokens: int
    prefix_merging: PrefixMerging
    max_grad_norm: float
    anchors: FrozenLogprobs = field(default_factory=FrozenLogprobs)
    epochs: int = 1
    """Passes over a step's data."""
    mini_batches: int = 1
    """Updates a pass."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What is recomputed and what the host keeps."""
    parallel: Parallel | None = None
    """The other processes of this step, where there are any."""

    def train(self, data: Sequence[DBRecordData], ages: Mapping[int, int] | None = None) -> StepResult:
        """Make a step's updates on ``data``; blocking, made for a worker thread.

        ``ages`` maps each policy version to the age of its tokens in optimizer steps; None: all are 0.
        Every update is over whole groups, with old and reference logprobs from before the first. Where an
        update is not finite, the step is what was made before it; without one, weights stay as they are.
        """
        with self._step():
            return self._train(data, ages)

    def _train(self, data: Sequence[DBRecordData], ages: Mapping[int, int] | None) -> StepResult:
        watch = Stopwatch(self.policy.model.device)
        parts = split_updates(data, self.mini_batches)
        passes = [self._anchored(self._pack(part, ages)) for part in parts]
        watch.lap("pack")
        made: list[dict[str, Any]] = []
        for forests in passes * self.epochs:
            result = self._update(forests)
            if not result.is_finite and not made:
                return result
            if not result.is_finite:
                logger.error("update %d of a step is not finite: the step ends before it", len(made) + 1)
                break
            made.append(result.metrics)
        self.scheduler.step()
        metrics = made[0]
        if len(parts) * self.epochs > 1:
            metrics = join_metrics(made, len(parts)) | {"updates": len(made)}
        metrics |= {"seconds_pack": watch.seconds["pack"]}
        return StepResult(metrics | sharing_metrics(metrics, call_tokens(data)), is_finite=True)

    def _anchored(self, forests: Sequence[TokenForest]) -> Sequence[TokenForest]:
        ranks = None if self.parallel is None else self.parallel.ranks
        policy = partial(each_logprobs, self.policy.model, ranks=ranks)
        return self.anchors.attach(forests, policy, self.options)

    def _pack(self, data: Sequence[DBRecordData], ages: Mapping[int, int] | None = None) -> list[TokenForest]:
        """This process's micro-batches of ``data``."""
        vocabulary = self.policy.model.config.get_text_config().vocab_size
        ranks, rank = (1, 0) if self.parallel is None else self.parallel.place
        planned = build_micro_batches(
            data, self.max_tokens, vocab_size=vocabulary, merging=self.prefix_merging, ranks=ranks,
            fill=CPU_FILL if self.device.type == "cpu" else None, ages=ages,
        )  # fmt: skip
        return planned[rank::ranks]

    def _step(self) -> AbstractContextManager[None]:
        return nullcontext() if self.parallel is None else self.parallel.step()

    def _update(self, forests: Sequence[TokenForest]) -> StepResult:
        """One optimizer update on this process's ``forests``; the schedule stays where it is."""
        watch = Stopwatch(self.policy.model.device)
        self.policy.model.train()
        with naming_the_knobs(self.memory, self.max_tokens):
            metrics = self._forward_backward(forests, watch)
        watch.lap("forward")
        grad_norm = self._clip()
        is_finite = math.isfinite(metrics["loss"]) and math.isfinite(grad_norm)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        if is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        watch.lap("optimizer")
        metrics |= {"grad_norm": grad_norm, "lr": learning_rate}
        return StepResult(metrics | self._speed(forests, metrics["tokens"], watch.seconds), is_finite)

    def _speed(
        self, forests: Sequence[TokenForest], tokens: int, seconds: dict[str, float]
    ) -> dict[str, float]:
        model = self.policy.model
        return step_metrics(
            forests,
            StepSeconds(
                forward=seconds["forward"],
                backward=seconds.get("backward", 0.0),
                optimizer=seconds["optimizer"],
            ),
            ModelShape.of(model.config),
            peak_flops(model.device, self.options.autocast_dtype or model.dtype),
            step_tokens=tokens,
            sharers=1 if self.parallel is None else self.parallel.mesh.layout.sharers,
        )

    def kept(self) -> SavableModel:
        """What a checkpoint holds of the model."""
        return self.policy.kept

    def published(self) -> SavableModel:
        """What engines load."""
        return self.policy.published

    def save_optimizer(self, folder: Path) -> None:
        """Write the optimizer's state."""
        save_optimizer(folder, self.policy.model, self.optimizer)

    def _forward_backward(self, forests: Sequence[TokenForest], watch: Stopwatch) -> dict[str, Any]:
        """The update's gradients, and what it reports, over all processes."""
        run = partial(
            forward_backward, self.policy.model, settings=self.settings, options=self.options, watch=watch
        )
        if self.parallel is None:
            return run(forests)
        metrics = run(forests, denominators=self.parallel.count(forests), ranks=self.parallel.ranks)
        return metrics | self.parallel.add({"tokens": metrics["tokens"]})

    def _clip(self) -> float:
        if self.parallel is not None:
            return self.parallel.clip(self.max_grad_norm)
        return float(torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self.max_grad_norm))
