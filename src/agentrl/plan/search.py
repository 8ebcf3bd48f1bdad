"""Search the layouts that fit: order them by estimated time, and simulate a step of each until enough fit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from agentrl.config.load import Configs
from agentrl.config.plan import PlanConfig
from agentrl.config.schema import (
    AdapterConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from agentrl.distributed.fsdp import GradientReduction
from agentrl.distributed.mesh import Layout
from agentrl.errors import ConfigError, ModelError
from agentrl.losses.settings import LossSettings
from agentrl.model.forward import ForwardOptions
from agentrl.model.logprobs import DEFAULT_CHUNK
from agentrl.model.output_head import DEFAULT_VOCAB_CHUNK
from agentrl.model.precision import Precision
from agentrl.plan.gpus import Cluster
from agentrl.plan.layouts import list_layouts, name_of, refusal
from agentrl.plan.model import PlannedModel
from agentrl.plan.rank_step import RankMemory, StepSpec, measure_step
from agentrl.plan.step_time import StepTime, estimate_step
from agentrl.plan.workload import Workload
from agentrl.train.memory import Checkpointing, checkpointing_mode

_MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
_LORA_SHARE = 0.01
"""Fraction of the weights that adapters have, for the time of reductions."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with the memory flags to try it with."""

    layout: Layout
    checkpointing: Checkpointing
    reduction: GradientReduction
    time: StepTime


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a candidate."""

    candidate: Candidate
    state: Literal["fits", "too large", "refused", "not tried"]
    memory: RankMemory | None = None
    """None if no step was simulated."""
    held: int = 0
    """Bytes of weights, gradients and moments of one rank: a lower bound of its memory."""
    reason: str = ""

    @property
    def peak(self) -> int:
        """Bytes at the simulated peak, or else the lower bound."""
        return self.held if self.memory is None else self.memory.peak


@dataclass(kw_only=True)
class Search:
    """The layouts of a cluster for one model and one workload; ``verdicts`` grows while ``run`` searches."""

    model: PlannedModel
    work: Workload
    cluster: Cluster
    configs: Configs
    reference_parameters: int = 0
    """Numbers in the reference model of ``--kl_coef``, which is sharded like the policy."""
    report: Callable[[str], None] = lambda _: None
    """Gets a line after each simulation."""
    verdicts: list[Verdict] = field(default_factory=list)
    refused: dict[str, list[Layout]] = field(default_factory=dict)
    """Reason → layouts that the trainer refuses."""

    @property
    def limit(self) -> int:
        """Bytes that a rank may use."""
        plan = self.configs[PlanConfig]
        return int(self.cluster.gpu.memory_gib * 2**30 * (1 - plan.memory_reserve))

    def reference_bytes(self, layout: Layout) -> int:
        """Return the bytes of a rank's shard of the reference model, whose part is that of the policy's."""
        part = self._weights(layout)[0] / self.model.parameters
        return int(self.reference_parameters * part * self.precision.products.itemsize)

    @property
    def precision(self) -> Precision:
        """The dtypes of the step on a GPU, where ``--autocast_bf16 auto`` is true."""
        if self.configs[ModelConfig].dtype == "bfloat16":
            return Precision(torch.bfloat16, torch.bfloat16)
        is_float32 = self.configs[TrainConfig].autocast_bf16 == "false"
        return Precision(products=torch.float32 if is_float32 else torch.bfloat16)

    def run(self) -> None:
        """Try the candidates; ``verdicts`` is complete up to an interruption, the fastest first.

        Those that keep least come first, until one fits; then the fastest ones.
        """
        candidates = sorted(self._candidates(), key=lambda item: item.time.total)
        deadline = time.monotonic() + self.configs[PlanConfig].search_seconds
        tried: list[Candidate] = []
        try:
            for candidate in self._leanest(candidates):
                if not self._try(candidate, deadline):
                    continue
                tried.append(candidate)
                if self.verdicts[-1].state == "fits":
                    break
            for candidate in candidates:
                if candidate not in tried and not self._try(candidate, deadline):
                    held = self.held_bytes(candidate)
                    self.verdicts.append(Verdict(candidate=candidate, state="not tried", held=held))
        finally:
            self.verdicts.sort(key=lambda item: item.candidate.time.total)

    def _leanest(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates that recompute most and reduce gradients most often."""
        mode = self._modes()[-1]
        return [
            item
            for item in candidates
            if item.checkpointing == mode and item.reduction == self._reductions(item.layout)[-1]
        ]

    def _try(self, candidate: Candidate, deadline: float) -> bool:
        """Append the verdict on ``candidate``; return False if it would take a simulation too many."""
        held = self.held_bytes(candidate)
        needed = max(held, held - self._single_gradients(candidate) + self._least_activations(candidate))
        if needed > self.limit:
            reason = self._too_large(candidate, needed)
            self.verdicts.append(Verdict(candidate=candidate, state="too large", held=held, reason=reason))
            return True
        plan = self.configs[PlanConfig]
        simulated = sum(item.memory is not None or item.state == "refused" for item in self.verdicts)
        fits = [item.candidate.time.total for item in self.verdicts if item.state == "fits"]
        enough = len(fits) >= plan.fitting and min(fits) <= candidate.time.total
        if (
            self._fits_unreduced(candidate)
            or enough
            or simulated >= plan.simulations
            or time.monotonic() > deadline
        ):
            return False
        self.verdicts.append(self._simulate(candidate, held))
        return True

    def held_bytes(self, candidate: Candidate) -> int:
        """Return the bytes of weights, gradients and moments of one rank, evenly divided."""
        memory = self.configs[MemoryConfig]
        sharded, whole = self._weights(candidate.layout)
        reference = self.reference_bytes(candidate.layout)
        if self.configs[AdapterConfig].lora_rank:
            return int(sharded * self.precision.products.itemsize) + reference
        moments = 0 if memory.optimizer_offload else 2 * sharded
        gradients = whole if self._accumulates(candidate) else sharded
        return int((sharded + gradients + moments) * self.precision.weights.itemsize) + reference

    def _weights(self, layout: Layout) -> tuple[float, float]:
        """Return the numbers of a rank's shard, and those of the whole model that FSDP2 shards."""
        model = self.model
        dense = (model.parameters - model.expert_parameters) / (layout.tp * layout.pp)
        experts = model.expert_parameters / (layout.tp * layout.pp * layout.ep)
        return dense / layout.shard + experts / (layout.dp_shard * layout.cp), dense + experts

    def _accumulates(self, candidate: Candidate) -> bool:
        layout = candidate.layout
        several = self.work.micro_batches(layout.data) > 1
        return several and candidate.reduction == "last" and layout.uses_fsdp

    def _single_gradients(self, candidate: Candidate) -> int:
        """Return the bytes of gradients that a single micro-batch makes when its activations are gone."""
        if self.configs[AdapterConfig].lora_rank or self.work.micro_batches(candidate.layout.data) > 1:
            return 0
        return int(self._weights(candidate.layout)[0] * self.precision.weights.itemsize)

    def _least_activations(self, candidate: Candidate) -> int:
        """Return a lower bound of the activations, from steps that were simulated.

        Keeping more never needs less, and ``tp`` × ``cp`` ranks hold at least their part.
        """
        found = 0.0
        for verdict in self.verdicts:
            known = verdict.candidate
            if verdict.memory is None or _MODES.index(candidate.checkpointing) > _MODES.index(
                known.checkpointing
            ):
                continue
            share = min(1.0, self._kept(candidate.layout) / self._kept(known.layout))
            found = max(found, verdict.memory.parts.get("activations", 0) * share)
        return int(found)

    def _kept(self, layout: Layout) -> float:
        """Return the layers whose activations the first stage keeps, times its part of their tokens."""
        in_flight = min(layout.pp, self.work.micro_batches(layout.data))
        return in_flight / (layout.pp * layout.tp * layout.cp)

    def _candidates(self) -> Iterator[Candidate]:
        plan = self.configs[PlanConfig]
        for layout in list_layouts(self.cluster, self.configs):
            reason = refusal(self.model, layout, self.cluster, self.configs, self.work.max_tokens)
            if reason:
                self.refused.setdefault(reason, []).append(layout)
                continue
            for mode in self._modes():
                for reduction in self._reductions(layout):
                    seconds = estimate_step(
                        self.model, self.work, layout, self.cluster, checkpointing=mode,
                        reduces_always=reduction == "every", element_bytes=self.precision.products.itemsize,
                        trained=_LORA_SHARE if self.configs[AdapterConfig].lora_rank else 1.0, mfu=plan.mfu,
                    )  # fmt: skip
                    yield Candidate(layout=layout, checkpointing=mode, reduction=reduction, time=seconds)

    def _modes(self) -> tuple[Checkpointing, ...]:
        train, memory = self.configs[TrainConfig], self.configs[MemoryConfig]
        if {"activation_checkpointing", "gradient_checkpointing"} & self.configs.given:
            return (checkpointing_mode(memory, train.gradient_checkpointing),)
        return _MODES

    def _reductions(self, layout: Layout) -> tuple[GradientReduction, ...]:
        if self.configs[MemoryConfig].gradient_reduction != "auto":
            return (self.configs[MemoryConfig].gradient_reduction,)
        accumulates = layout.uses_fsdp and self.work.micro_batches(layout.data) > 1
        return ("last", "every") if accumulates else ("last",)

    def _simulate(self, candidate: Candidate, held: int) -> Verdict:
        started = time.monotonic()
        name = f"{name_of(candidate.layout)}, {candidate.checkpointing}, {candidate.reduction}"
        try:
            measured = measure_step(self.spec(candidate), candidate.layout)
            memory = self._with_reference(measured, candidate.layout)
        except (ConfigError, ModelError) as error:
            reason = f"{error.message}; {error.hint}"
            self.report(f"{name}: refused: {reason}")
            return Verdict(candidate=candidate, state="refused", held=held, reason=reason)
        fits = memory.peak <= self.limit
        self.report(
            f"{name}: {memory.peak / 2**30:.1f} of {self.limit / 2**30:.1f} GiB,"
            f" {'fits' if fits else 'too large'} ({time.monotonic() - started:.0f} s)"
        )
        return Verdict(
            candidate=candidate,
            state="fits" if fits else "too large",
            memory=memory,
            held=held,
            reason="" if fits else self._too_large(candidate, memory.peak),
        )

    def _with_reference(self, memory: RankMemory, layout: Layout) -> RankMemory:
        held = self.reference_bytes(layout)
        if not held:
            return memory
        parts = {**memory.parts, "reference model": held}
        return dataclasses.replace(memory, peak=memory.peak + held, parts=parts)

    def spec(self, candidate: Candidate) -> StepSpec:
        """Return the step to simulate: a pipeline needs one micro-batch more than stages, others two."""
        configs, work, layout = self.configs, self.work, candidate.layout
        train = configs[TrainConfig]
        chunk = train.loss_seq_chunk_size or DEFAULT_CHUNK
        batches = min(work.micro_batches(layout.data), 2 if layout.pp == 1 else layout.pp + 1)
        return StepSpec(
            config=self.model.config,
            precision=self.precision,
            max_tokens=work.max_tokens,
            chain_tokens=work.trajectory_tokens,
            trained_tokens=min(chunk, max(1, round(work.max_tokens * work.trained_share))),
            micro_batches=batches,
            checkpointing=candidate.checkpointing,
            memory=dataclasses.replace(configs[MemoryConfig], gradient_reduction=candidate.reduction),
            optim=configs[OptimConfig],
            adapter=configs[AdapterConfig],
            loss=LossSettings.of(configs[LossConfig]),
            options=ForwardOptions(
                chunk_size=chunk,
                entropy_gradient=configs[LossConfig].entropy_coef != 0,
                vocab_chunk_size=configs[MemoryConfig].loss_vocab_chunk_size or DEFAULT_VOCAB_CHUNK,
            ),
        )

    def _fits_unreduced(self, candidate: Candidate) -> bool:
        """Return whether the layout fits as it is without reducing gradients in each micro-batch."""
        return any(
            verdict.state == "fits"
            and (verdict.candidate.layout, verdict.candidate.checkpointing)
            == (candidate.layout, candidate.checkpointing)
            for verdict in self.verdicts
        )

    def _too_large(self, candidate: Candidate, needed: int) -> str:
        memory = self.configs[MemoryConfig]
        remedies = {
            "--activation_checkpointing full": candidate.checkpointing != "full",
            "--gradient_reduction every": self._accumulates(candidate),
            "--optimizer_offload true": not memory.optimizer_offload,
            "--lora_rank": not self.configs[AdapterConfig].lora_rank,
            "more GPUs": True,
        }
        helpful = " or ".join(name for name, helps in remedies.items() if helps)
        return f"needs {needed / 2**30:.1f} GiB or more of {self.limit / 2**30:.1f}; {helpful} would help"
