"""One training step: data → updates → micro-batches → gradients → clipping → AdamW."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from agentrl.config.training import MemoryConfig
from agentrl.data.forest import TokenForest
from agentrl.data.planner import CPU_FILL, PrefixMerging, build_micro_batches
from agentrl.distributed.fsdp import clean_step
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.images import Image
from agentrl.documents.training import DBRecordData
from agentrl.errors import TrainingError, first_line
from agentrl.losses.settings import LossSettings
from agentrl.model.flops import Backward, DevicePeak, ModelShape, Stopwatch
from agentrl.model.forward import ForwardOptions
from agentrl.model.load import Policy
from agentrl.model.lora import Adapter
from agentrl.model.routing import RouterReplay
from agentrl.model.vision import attach_pixels
from agentrl.train.metrics import call_tokens, join_metrics, merging_metrics, routing_metrics, speed_metrics
from agentrl.train.step_loss import StepLoss, TokenRecorder, TokenValues, recorders

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA out of memory", "out of memory")


@dataclass(frozen=True)
class StepResult:
    """What a step or an update reports."""

    metrics: dict[str, Any]
    is_finite: bool
    """Loss and gradient norm are finite, and the optimizer has stepped."""
    tokens: Sequence[TokenValues] = ()
    """Values of single tokens, by trajectory."""


@dataclass(frozen=True)
class FrozenLogprobs:
    """Which logprobs are attached to a step's forests: of the policy, of a reference, both or none."""

    start: bool = False
    """Attach those of the policy at the start of the step."""
    reference: Reference | None = None

    @torch.no_grad()
    def attach(
        self, policy: ParallelModel, forests: Sequence[TokenForest], options: ForwardOptions
    ) -> list[TokenForest]:
        """Return the forests with the logprobs attached, float32[T] in the CPU's memory."""
        attached = list(forests)
        if self.start:
            computed = policy.logprobs(attached, options)
            attached = [
                replace(forest, start_logprob=_to_numpy(logprobs))
                for forest, (logprobs, _) in zip(attached, computed, strict=True)
            ]
        if self.reference is not None:
            # The reference is another model: its own routers choose, as they would if it sampled.
            free = [replace(forest, routing=None) for forest in attached]
            computed = self.reference.logprobs(policy, free, options)
            attached = [
                replace(forest, reference_logprob=_to_numpy(logprobs))
                for forest, (logprobs, _) in zip(attached, computed, strict=True)
            ]
        return attached


def _to_numpy(logprobs: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = logprobs.detach().float().cpu().numpy()
    return found


@dataclass(frozen=True)
class Reference:
    """The model that a loss compares the policy with: its own, or the policy without its adapter."""

    model: ParallelModel | None = None
    """Split and sharded over the ranks like the policy."""
    adapter: Adapter | None = None
    """The policy's, if the reference is the policy without it."""

    def logprobs(
        self, policy: ParallelModel, forests: Sequence[TokenForest], options: ForwardOptions
    ) -> list[tuple[Tensor, Tensor]]:
        """Return logprob and entropy of each trainable token of each forest."""
        if self.model is not None:
            return self.model.logprobs(forests, options)
        assert self.adapter is not None
        with self.adapter.disabled():
            return policy.logprobs(forests, options)


@dataclass(frozen=True, kw_only=True)
class PolicyTrainer:
    """Computes training steps on one rank. It knows neither the database nor the other ranks' data."""

    policy: Policy
    model: ParallelModel
    """Runs ``policy.model``."""
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    settings: LossSettings
    options: ForwardOptions
    max_tokens: int
    """Tokens of a micro-batch."""
    prefix_merging: PrefixMerging
    max_grad_norm: float
    frozen: FrozenLogprobs = field(default_factory=FrozenLogprobs)
    """Logprobs that stay as they are while the updates of a step change the policy."""
    epochs: int = 1
    """Passes over a step's data."""
    mini_batches: int = 1
    """Optimizer updates per pass."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    peak: DevicePeak = field(default_factory=lambda: DevicePeak(None))
    """What ``mfu`` compares a step's speed with."""
    recorded_tokens: int = 0
    """Tokens of a step whose log-ratio and entropy are reported, at most."""
    replay: RouterReplay | None = None
    """Of a mixture's routers, which take the experts that the engine chose."""

    def train(
        self,
        data: Sequence[DBRecordData],
        ages: Mapping[int, int] | None = None,
        images: Mapping[str, Image] = MappingProxyType({}),
    ) -> StepResult:
        """Make a step's optimizer updates on ``data``. It blocks: call it in a worker thread.

        ``ages`` maps each policy version to the age of its tokens in optimizer steps; without it all are 0.
        ``images`` has those of the data, by hash.
        Each update trains whole groups. Old and reference logprobs are those from before the first update.
        An update that is not finite ends the step before it; if it is the first, weights do not change. A
        step of which the loss chooses no data changes neither weights nor schedule.
        """
        data = self.settings.loss.choose(data)
        if not data:
            logger.warning("no data of the step are trained: %s chooses none", self.settings.loss_calculater)
            return StepResult({"loss": 0.0, "grad_norm": 0.0, "trajectories": 0, "trainable_tokens": 0}, True)
        with clean_step(self.model):
            watch = Stopwatch(self.policy.model.device)
            parts = split_updates(data, self.mini_batches)
            updates = [
                self.frozen.attach(self.model, self.pack(part, ages, images), self.options) for part in parts
            ]
            watch.lap("pack")
            made: list[dict[str, Any]] = []
            recorded = recorders(parts, self.recorded_tokens, self.policy.model.device)
            for number, forests in enumerate(updates * self.epochs):
                recorder = recorded[number] if number < len(recorded) else None
                result = self._update(forests, recorder, parts[number % len(parts)])
                if not result.is_finite and not made:
                    return result
                if not result.is_finite:
                    logger.error("update %d of a step is not finite: the step ends before it", len(made) + 1)
                    break
                made.append(result.metrics)
            self.scheduler.step()
            tokens = [
                values for recorder in recorded[: len(made)] for values in recorder.collect(self.model.mesh)
            ]
        metrics = made[0]
        if len(parts) * self.epochs > 1:
            metrics = join_metrics(made, len(parts)) | {"updates": len(made)}
        metrics |= {"seconds_pack": watch.seconds["pack"]}
        return StepResult(metrics | merging_metrics(metrics, call_tokens(data)), True, tokens)

    def pack(
        self,
        data: Sequence[DBRecordData],
        ages: Mapping[int, int] | None = None,
        images: Mapping[str, Image] = MappingProxyType({}),
    ) -> list[TokenForest]:
        """Plan the micro-batches of ``data`` over all ranks, and return this rank's.

        Raises ForestError for an image that is not in ``images``.
        """
        mesh, model = self.model.mesh, self.policy.model
        planned = build_micro_batches(
            data, self.max_tokens, vocab_size=model.config.get_text_config().vocab_size,
            merging=self.prefix_merging, ranks=mesh.layout.data,
            fill=CPU_FILL if model.device.type == "cpu" else None, ages=ages,
            rows=self.model.executor.rows, experts=None if self.replay is None else self.replay.shape,
        )  # fmt: skip
        own = planned[mesh.data_rank :: mesh.layout.data]
        return [attach_pixels(forest, self.policy.pixels, images) for forest in own]

    def _update(
        self,
        forests: Sequence[TokenForest],
        recorder: TokenRecorder | None,
        data: Sequence[DBRecordData] = (),
    ) -> StepResult:
        """Make one optimizer update on this rank's ``forests`` of ``data``; the schedule does not move."""
        watch = Stopwatch(self.policy.model.device)
        self.model.train()
        with explain_out_of_memory(self.memory, self.max_tokens, ranks=self.model.mesh.layout.world):
            metrics = forward_backward(
                self.model,
                forests,
                self.settings,
                options=self.options,
                watch=watch,
                recorder=recorder,
                data=data,
            )
        watch.lap("forward")
        grad_norm = self.model.clip_gradients(self.max_grad_norm)
        is_finite = math.isfinite(metrics["loss"]) and math.isfinite(grad_norm)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        if is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        watch.lap("optimizer")
        model = self.policy.model
        speed = speed_metrics(
            forests, watch.seconds, ModelShape.of(model.config), self.peak, backward=Backward.of(model),
            step_tokens=metrics["tokens"], ranks=self.model.mesh.layout.ranks_per_data,
        )  # fmt: skip
        if self.replay is not None:
            speed |= routing_metrics(forests, self.replay.take_differing())
        return StepResult(metrics | {"grad_norm": grad_norm, "lr": learning_rate} | speed, is_finite)


@contextmanager
def explain_out_of_memory(config: MemoryConfig, max_tokens: int, *, ranks: int = 1) -> Iterator[None]:
    """Raise a TrainingError that names the flags that would help, if the block runs out of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in _OUT_OF_MEMORY):
            raise
        raise TrainingError(
            f"out of memory with micro-batches of --max_tokens {max_tokens}: {first_line(error)}",
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


def split_updates(data: Sequence[DBRecordData], parts: int) -> list[list[DBRecordData]]:
    """Split ``data`` into at most ``parts`` mini-batches of whole groups with balanced trainable tokens.

    A group stays together, so that prefixes that its trajectories share are computed once. No mini-batch is
    empty. The same data give the same mini-batches.
    """
    groups: dict[str, list[DBRecordData]] = {}
    for item in data:
        groups.setdefault(item.task, []).append(item)
    sizes = {task: sum(item.trainable_tokens for item in items) for task, items in groups.items()}
    order = {task: number for number, task in enumerate(groups)}
    chosen: list[list[str]] = [[] for _ in range(min(parts, len(groups)))]
    for task in sorted(groups, key=lambda task: (-sizes[task], order[task])):
        min(chosen, key=lambda tasks: sum(sizes[name] for name in tasks)).append(task)
    return [[item for task in sorted(tasks, key=order.__getitem__) for item in groups[task]]
            for tasks in chosen]  # fmt: skip


def forward_backward(
    model: ParallelModel,
    forests: Sequence[TokenForest],
    settings: LossSettings,
    *,
    options: ForwardOptions | None = None,
    watch: Stopwatch | None = None,
    recorder: TokenRecorder | None = None,
    data: Sequence[DBRecordData] = (),
) -> dict[str, Any]:
    """Add the gradients of one update's loss to ``model``, one micro-batch at a time, and report the update.

    ``forests`` are this rank's micro-batches. Loss and gradients are those of all ranks' forests in one
    batch, however trajectories are merged, split and distributed. ``watch`` gets the seconds of ``forward``
    and ``backward``, ``recorder`` the values of single tokens. ``data`` are the update's, of all ranks: a
    loss that compares trajectories reads them.

    Returns ``loss``, ``tokens``, ``trainable_tokens`` and ``trajectories`` of all ranks, and everything in
    ``TokenMetrics.report``. Raises ForestError if no token is trainable, ConfigError for a loss or correction
    that does not exist, ModelError for a model that is not exact on the forests.
    """
    options = replace(
        options or ForwardOptions(), entropy_gradient=settings.entropy_coef > 0,
        divergence=bool(settings.distill_coef),
    )  # fmt: skip
    loss = StepLoss.start(model, forests, settings, options, recorder, data)
    model.forward_backward(forests, options, loss.add, watch or Stopwatch(model.model.device))
    report = model.mesh.sum_reports(loss.report())
    return {
        "loss": report.loss,
        "tokens": loss.tokens,
        "trainable_tokens": loss.whole.tokens,
        "trajectories": round(loss.whole.trajectories),
        **report.report(),
    }
