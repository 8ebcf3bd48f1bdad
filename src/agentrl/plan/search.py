"""Search the layouts that fit: list them, order them by estimated time, compute the memory of each."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from agentrl.config.load import Configs
from agentrl.config.schema import (
    AdapterConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from agentrl.config.training import PlanConfig
from agentrl.distributed.apply import layer_styles
from agentrl.distributed.context_parallel import check_context
from agentrl.distributed.expert_parallel import check_experts
from agentrl.distributed.fsdp import GradientReduction
from agentrl.distributed.mesh import DIMENSIONS, Layout, check_flags
from agentrl.distributed.pipeline_stages import assign_model_layers, check_stages
from agentrl.errors import AgentRLError
from agentrl.model.forward import ForwardOptions
from agentrl.model.logprobs import DEFAULT_CHUNK, DEFAULT_VOCAB_CHUNK
from agentrl.model.lora import add_adapter
from agentrl.model.precision import Precision
from agentrl.plan.estimates import StepTime, estimate_step
from agentrl.plan.memory import RankMemory, StepSpec, measure_step
from agentrl.plan.model import ModelNumbers, PlannedModel
from agentrl.plan.workload import Cluster, Workload
from agentrl.train.build import Checkpointing, checkpointing_mode
from agentrl.train.optimizer import freeze

_MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
_LORA_SHARE = 0.01
"""Fraction of the weights that adapters have, for the time of reductions."""
_CHOSEN = tuple(name for name in DIMENSIONS if name != "dp_shard")


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
    state: Literal["fits", "too large", "slower"]
    """``slower`` than ``--fitting`` layouts that fit, or than the same one without more reductions."""
    memory: RankMemory
    reason: str = ""


@dataclass(kw_only=True)
class Search:
    """The layouts of a cluster for one model and one workload; ``run`` fills ``verdicts`` and ``refused``."""

    model: PlannedModel
    work: Workload
    cluster: Cluster
    configs: Configs
    reference_parameters: int = 0
    """Numbers in the reference model of the loss, which is sharded like the policy."""
    verdicts: list[Verdict] = field(default_factory=list)
    """The fastest first."""
    refused: dict[str, list[Layout]] = field(default_factory=dict)
    """Reason → layouts that the trainer refuses."""

    @property
    def limit(self) -> int:
        """Bytes that a rank may use."""
        plan = self.configs[PlanConfig]
        return int(self.cluster.gpu.memory_gib * 2**30 * (1 - plan.memory_reserve))

    @property
    def precision(self) -> Precision:
        """The dtypes of the step on a GPU, where ``--autocast_bf16 auto`` is true."""
        if self.configs[ModelConfig].dtype == "bfloat16":
            return Precision(torch.bfloat16, torch.bfloat16)
        is_float32 = self.configs[TrainConfig].autocast_bf16 == "false"
        return Precision(products=torch.float32 if is_float32 else torch.bfloat16)

    @cached_property
    def numbers(self) -> ModelNumbers:
        """The model's weights by part, with adapters and without frozen ones."""
        module, adapter = copy.deepcopy(self.model.module), self.configs[AdapterConfig]
        if adapter.lora_rank:
            add_adapter(module, adapter, Path(), None)
        freeze(module, self.configs[OptimConfig].freeze)
        return ModelNumbers.of(module)

    def run(self) -> None:
        """Compute the memory of every candidate, the fastest first."""
        enough = self.configs[PlanConfig].fitting
        fits: list[Candidate] = []
        for candidate in sorted(self._candidates(), key=lambda item: item.time.total):
            memory = measure_step(self.numbers, self.spec(candidate), candidate.layout)
            same = {(item.layout, item.checkpointing) for item in fits}
            if memory.peak > self.limit:
                reason = self._too_large(candidate, memory.peak)
                verdict = Verdict(candidate=candidate, state="too large", memory=memory, reason=reason)
            elif len(fits) >= enough or (candidate.layout, candidate.checkpointing) in same:
                verdict = Verdict(candidate=candidate, state="slower", memory=memory)
            else:
                verdict = Verdict(candidate=candidate, state="fits", memory=memory)
                fits.append(candidate)
            self.verdicts.append(verdict)

    def _candidates(self) -> Iterator[Candidate]:
        plan = self.configs[PlanConfig]
        for layout in list_layouts(self.cluster, self.configs):
            reason = refusal(self.numbers.module, layout, self.cluster, self.configs, self.work.max_tokens)
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
        is_chosen = {"activation_checkpointing", "gradient_checkpointing"} & self.configs.given
        if is_chosen or memory.activation_offload:  # which is refused with other modes than full
            return (checkpointing_mode(memory, train.gradient_checkpointing),)
        return _MODES

    def _accumulates(self, layout: Layout) -> bool:
        return layout.uses_fsdp and self.work.micro_batches(layout.data) > 1

    def _reductions(self, layout: Layout) -> tuple[GradientReduction, ...]:
        if self.configs[MemoryConfig].gradient_reduction != "auto":
            return (self.configs[MemoryConfig].gradient_reduction,)
        return ("last", "every") if self._accumulates(layout) else ("last",)

    def spec(self, candidate: Candidate) -> StepSpec:
        """Return the step whose memory is computed."""
        configs, work = self.configs, self.work
        chunk = configs[TrainConfig].loss_seq_chunk_size or DEFAULT_CHUNK
        return StepSpec(
            config=self.model.config,
            precision=self.precision,
            max_tokens=work.max_tokens,
            trained_tokens=min(chunk, max(1, round(work.max_tokens * work.trained_share))),
            micro_batches=work.micro_batches(candidate.layout.data),
            checkpointing=candidate.checkpointing,
            memory=dataclasses.replace(configs[MemoryConfig], gradient_reduction=candidate.reduction),
            adapter=configs[AdapterConfig],
            options=ForwardOptions(
                chunk_size=chunk,
                entropy_gradient=configs[LossConfig].entropy_coef != 0,
                vocab_chunk_size=configs[MemoryConfig].loss_vocab_chunk_size or DEFAULT_VOCAB_CHUNK,
            ),
            reference=self.reference_parameters / self.model.parameters,
        )

    def _too_large(self, candidate: Candidate, needed: int) -> str:
        memory = self.configs[MemoryConfig]
        accumulates = candidate.reduction == "last" and self._accumulates(candidate.layout)
        remedies = {
            "--activation_checkpointing full": candidate.checkpointing != "full",
            "--gradient_reduction every": accumulates,
            "--activation_offload true": candidate.checkpointing == "full" and not memory.activation_offload,
            "--optimizer_offload true": not memory.optimizer_offload,
            "--lora_rank": not self.configs[AdapterConfig].lora_rank,
            "more GPUs": True,
        }
        helpful = " or ".join(name for name, helps in remedies.items() if helps)
        return f"needs {needed / 2**30:.1f} GiB of {self.limit / 2**30:.1f}; {helpful} would help"


def name_of(layout: Layout) -> str:
    """Return the layout as text, such as ``fsdp4 × tp2``."""
    names = {"dp_shard": "fsdp", "dp_replicate": "replicate"}
    parts = [
        f"{names.get(name, name)}{size}"
        for name, size in zip(DIMENSIONS, layout.sizes, strict=True)
        if size > 1
    ]
    return " × ".join(parts) or "one GPU"


def list_layouts(cluster: Cluster, configs: Configs) -> Iterator[Layout]:
    """Yield the layouts of all GPUs; a size that was given as a flag is kept.

    Copies of the model (``dp_replicate``) are listed for several machines, one copy each.
    """
    train, world = configs[TrainConfig], cluster.count
    nodes = -(-world // cluster.per_node)
    choices: dict[str, list[int]] = {}
    for name in _CHOSEN:
        given = int(getattr(train, f"{name}_size"))
        if f"{name}_size" in configs.given or given > 1:
            choices[name] = [given]
        elif name == "dp_replicate":
            choices[name] = sorted({1, nodes})
        else:
            choices[name] = [size for size in range(1, world + 1) if world % size == 0]
    for sizes in itertools.product(*choices.values()):
        taken = math.prod(sizes)
        if world % taken == 0:
            yield Layout(**dict(zip(choices, sizes, strict=True)), dp_shard=world // taken)


def refusal(module: Any, layout: Layout, cluster: Cluster, configs: Configs, max_tokens: int) -> str:
    """Return why the trainer refuses ``layout`` of a causal LM, and what would help; empty if it does not."""
    checks: list[Callable[[], object]] = [
        lambda: check_flags(layout, configs[AdapterConfig], configs[MemoryConfig])
    ]
    if layout.tp > 1:
        checks.append(lambda: layer_styles(module, layout.tp))
    if layout.ep * layout.tp > 1:
        checks.append(lambda: check_experts(module, layout))
    if layout.pp > 1:
        checks.append(lambda: check_stages(module, assign_model_layers(module, layout.pp)))
    if layout.cp > 1:
        checks.append(lambda: check_context(module, max_tokens))
    for check in checks:
        try:
            check()
        except AgentRLError as error:
            return f"{error.message}; {error.hint}"
    if max(layout.tp, layout.ep) > cluster.per_node:
        return f"tensor and expert parallelism beyond one machine of {cluster.per_node} GPUs are not planned"
    return ""
