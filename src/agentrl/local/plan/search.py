"""Search the layouts that fit: list them, estimate a step's seconds by a roofline, order them by time."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.text import Text

from agentrl.config.flags import flag_words
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AdapterConfig,
    AgentConfig,
    CriticConfig,
    EngineConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    SamplingConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.config.training import PlanConfig
from agentrl.distributed.context_parallel import check_context
from agentrl.distributed.expert_parallel import check_experts
from agentrl.distributed.fsdp import GradientReduction
from agentrl.distributed.mesh import DIMENSIONS, Layout, check_flags
from agentrl.distributed.parallel_model import layer_styles
from agentrl.distributed.pipeline_stages import assign_model_layers, check_stages
from agentrl.errors import AgentRLError, ConfigError
from agentrl.inference.engines.commands import COLOCATED_MEMORY
from agentrl.local.placement import Gpu, GpuCluster
from agentrl.local.plan.memory import PARTS, ModelNumbers, PlannedModel, RankMemory, StepSpec, measure_step
from agentrl.model.flops import Precision
from agentrl.model.logprobs import DEFAULT_VOCAB_CHUNK, GPU_CHUNK, ForwardOptions
from agentrl.model.lora import add_adapter
from agentrl.observe.terminal import clean, table
from agentrl.train.build import Checkpointing, checkpointing_mode
from agentrl.train.optimizer import freeze


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Trajectories of one step and the tokens that they cost; all lengths are means."""

    groups: int
    group_size: int
    trajectory_tokens: int
    turns: int
    trained_share: float
    """Fraction of a trajectory's tokens that is generated, and so trained."""
    computed_tokens: int
    """Tokens that one pass over the step computes, after merging."""
    max_tokens: int
    """Tokens of a micro-batch."""
    passes: int
    """Passes over a step's data."""

    @property
    def trajectories(self) -> int:
        """Trajectories of one step."""
        return self.groups * self.group_size

    @property
    def generated_tokens(self) -> int:
        """Generated tokens of one step."""
        return round(self.trajectories * self.trajectory_tokens * self.trained_share)

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, per pass and layer."""
        return self.computed_tokens * (self.trajectory_tokens + 1) / 2

    def rank_tokens(self, data_ranks: int) -> int:
        """Return the tokens of the rank with most work: at least one trajectory."""
        longest = min(self.trajectory_tokens, self.max_tokens)
        return max(-(-self.computed_tokens // data_ranks), longest)

    def micro_batches(self, data_ranks: int) -> int:
        """Return the micro-batches that each rank runs in one pass."""
        return max(1, math.ceil(self.rank_tokens(data_ranks) / self.max_tokens))


def build_workload(configs: Configs) -> Workload:
    """Return the workload that the flags describe; ``--max_tokens`` is ``--context`` unless it is given."""
    plan, train = configs[PlanConfig], configs[TrainConfig]
    max_tokens = train.max_tokens if "max_tokens" in configs.given else plan.context
    if plan.context > max_tokens:
        raise ConfigError(
            f"--context {plan.context} is longer than a micro-batch of --max_tokens {max_tokens}",
            hint=f"set --max_tokens {plan.context} or more: a model call is trained in one piece",
        )
    length = plan.trajectory_tokens or plan.context
    if length > plan.context or plan.prompt_tokens > length:
        raise ConfigError(
            f"--prompt_tokens {plan.prompt_tokens}, --trajectory_tokens {length} and --context {plan.context}"
            " do not contain one another",
            hint="give prompt_tokens ≤ trajectory_tokens ≤ context",
        )
    groups, size = train.groups_per_step, configs[TaskConfig].num_generations
    computed = {
        "off": groups * size * length * (plan.turns + 1) // 2,
        "trajectory": groups * size * length,
        "group": groups * (plan.prompt_tokens + size * (length - plan.prompt_tokens)),
    }[train.prefix_merging]
    return Workload(
        groups=groups, group_size=size, trajectory_tokens=length, turns=plan.turns,
        trained_share=plan.trained_share, computed_tokens=computed, max_tokens=max_tokens,
        passes=configs[OptimConfig].num_epochs_per_batch,
    )  # fmt: skip


_RECOMPUTED = {"none": 1.0, "selective": 1.05, "full": 4 / 3}
"""FLOPs of a step with activation checkpointing, relative to one without."""


_LAYER_SECONDS = 3e-3
"""Time in which Python launches the kernels of a layer, forward and backward; an assumption."""
_SAMPLER_MS = ((6_000, 2.7), (75_000, 4.6))
"""(tokens of context, CPU milliseconds a turn) of a sampler."""
_GATEWAY_MS = ((6_000, 6.9), (75_000, 9.1))
"""The same for a call through the gateway."""
_SAMPLER_MIB = 494 / 1000
"""Memory per concurrent trajectory of 6K tokens."""
_MONGOD_TRAJECTORIES = 17.3 / 0.499
"""Trajectories per second and core of mongod, with 1,000 samplers."""
_STORED_BYTES = 220 * 1024 / 20_000
"""Bytes on disk per token of a trajectory of 20 turns."""
_BUSY = 0.5
"""Fraction of a core that is planned to be used."""
_BANDWIDTH_SHARE = 0.6
"""Fraction of the memory bandwidth that decoding is assumed to reach."""
_KV_SHARE = 0.85
"""Fraction of a GPU's memory for an engine's weights and KV cache."""
_MOST_REQUESTS = 256
"""Requests that an engine decodes at once, at most; an assumption."""
_DECODE_SECONDS = 0.004
"""Shortest time in which an engine decodes one token of all its requests; an assumption."""
_ENGINE_BYTES = 2
"""Bytes of a weight and of a KV entry in an engine: bfloat16."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step by part; ``total`` adds what is not hidden behind computation."""

    compute: float
    """Matrix products and attention."""
    bubble: float
    """Idle time of pipeline stages."""
    gather: float
    """All-gathers and reductions of FSDP2; the part beyond ``compute`` counts."""
    exchange: float
    """Exchanges of activations: tensor, context, expert and pipeline parallelism."""
    optimizer: float
    launch: float = 0.0
    """Launching kernels; a lower bound of ``compute``, for small models."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return max(self.compute, self.gather, self.launch) + self.bubble + self.exchange + self.optimizer


def estimate_step(
    model: PlannedModel,
    work: Workload,
    layout: Layout,
    cluster: GpuCluster,
    *,
    checkpointing: str,
    reduces_always: bool,
    element_bytes: int,
    trained: float,
    mfu: float,
) -> StepTime:
    """Return the estimate for one layout.

    ``element_bytes``: of a weight. ``trained``: the fraction of the weights that have gradients.
    ``reduces_always``: gradients are reduced in every micro-batch.
    """
    batches = work.micro_batches(layout.data)
    rank_tokens = work.rank_tokens(layout.data)
    share = rank_tokens / work.computed_tokens
    flops = model.shape.step_flops(
        rank_tokens, round(work.generated_tokens * share), round(work.pairs * share)
    )
    rate = cluster.gpu.tflops * 1e12 * mfu * layout.ranks_per_data
    compute = flops * _RECOMPUTED[checkpointing] / rate
    gather = _gather_seconds(
        model, layout, cluster, batches, element_bytes, batches if reduces_always else 1, trained
    )
    exchange = _exchange_seconds(model, layout, cluster, rank_tokens, recomputes=checkpointing == "full")
    launch = batches * model.shape.layers / layout.pp * _LAYER_SECONDS * _RECOMPUTED[checkpointing]
    held = model.parameters / (layout.tp * layout.pp * layout.shard) * trained
    return StepTime(
        compute=compute * work.passes,
        bubble=compute * (layout.pp - 1) / batches * work.passes,
        gather=gather * work.passes,
        exchange=exchange * work.passes,
        launch=launch * work.passes,
        optimizer=work.passes * held * element_bytes * 7 / (cluster.gpu.memory_gb_s * 1e9),
    )


def _gather_seconds(
    model: PlannedModel,
    layout: Layout,
    cluster: GpuCluster,
    batches: int,
    element_bytes: int,
    reductions: int,
    trained: float,
) -> float:
    """Weights are gathered for forward and backward; gradients are scattered, and replicas summed."""
    part = model.parameters * element_bytes / (layout.tp * layout.pp)
    seconds = 0.0
    if layout.shard > 1:
        moved = part * (layout.shard - 1) / layout.shard
        link = cluster.link_gb_s(layout.shard * layout.tp) * 1e9
        seconds += (2 * batches + reductions * trained) * moved / link
    if layout.dp_replicate > 1:
        link = cluster.link_gb_s(cluster.count) * 1e9
        seconds += 2 * part * trained / layout.shard / link
    return seconds


def _exchange_seconds(
    model: PlannedModel, layout: Layout, cluster: GpuCluster, rank_tokens: int, *, recomputes: bool
) -> float:
    shape, width = model.shape, 2
    layers = shape.layers / layout.pp
    tokens = rank_tokens / layout.cp
    rounds = 3 if recomputes else 2
    seconds = 0.0
    if layout.tp > 1:
        moved = 2 * (layout.tp - 1) / layout.tp * tokens * shape.hidden * width
        seconds += 2 * rounds * layers * moved / (cluster.link_gb_s(layout.tp) * 1e9)
    if layout.cp > 1:
        states = 2 * rank_tokens * shape.kv_heads / layout.tp * shape.head_dim * width
        moved = (layout.cp - 1) / layout.cp * states
        seconds += (
            (rounds + 1) * layers * moved / (cluster.link_gb_s(layout.cp * layout.ep * layout.tp) * 1e9)
        )
    if layout.ep > 1:
        chosen = int(getattr(model.config.get_text_config(), "num_experts_per_tok", 1))
        moved = (layout.ep - 1) / layout.ep * tokens / layout.tp * chosen * shape.hidden * width
        seconds += 2 * rounds * layers * moved / (cluster.link_gb_s(layout.ep * layout.tp) * 1e9)
    if layout.pp > 1:
        moved = 2 * tokens * shape.hidden * width
        seconds += moved / (cluster.link_gb_s(cluster.count) * 1e9)
    return seconds


@dataclass(frozen=True, kw_only=True)
class PlannedServices:
    """What keeps a trainer supplied with trajectories."""

    trajectories_per_second: float
    turns_per_second: float
    generated_per_second: float
    in_flight: int
    """Trajectories that are sampled at the same time."""
    sampler_cores: float
    samplers: int
    """Processes, each of one core."""
    sampler_memory_gib: float
    """Of all samplers together."""
    gateway_cores: float
    """If all calls go through gateways."""
    engine_gpu: str
    engine_tp: int
    """GPUs of one engine."""
    engine_tokens_per_second: float
    """Generated by one engine; a roofline estimate."""
    engines: int
    mongod_cores: float
    stored_gib_per_hour: float
    database_nodes: int
    """Members of the replica set: one stores, three also survive the loss of a machine."""


def size_services(
    model: PlannedModel,
    work: Workload,
    step_seconds: float,
    gpu: Gpu,
    *,
    request_tokens_per_second: float,
    tool_seconds: float,
) -> PlannedServices:
    """Return the services that deliver a step's trajectories every ``step_seconds``."""
    rate = work.trajectories / step_seconds
    turns = rate * work.turns
    generated = work.generated_tokens / step_seconds
    seconds = work.generated_tokens / work.trajectories / request_tokens_per_second
    in_flight = max(1, math.ceil(rate * (seconds + work.turns * tool_seconds)))
    context = work.trajectory_tokens / 2
    cores = turns * _at(_SAMPLER_MS, context) / 1000
    ranks, speed, slots = _engine(model, gpu, work.trajectory_tokens)
    decoding = in_flight * seconds / (seconds + work.turns * tool_seconds)
    return PlannedServices(
        trajectories_per_second=rate,
        turns_per_second=turns,
        generated_per_second=generated,
        in_flight=in_flight,
        sampler_cores=cores,
        samplers=max(1, math.ceil(cores / _BUSY)),
        sampler_memory_gib=in_flight * _SAMPLER_MIB * max(1.0, work.trajectory_tokens / 6_000) / 1024,
        gateway_cores=turns * _at(_GATEWAY_MS, context) / 1000,
        engine_gpu=gpu.name,
        engine_tp=ranks,
        engine_tokens_per_second=speed,
        engines=max(1, math.ceil(generated / speed), math.ceil(decoding / slots)),
        mongod_cores=rate / _MONGOD_TRAJECTORIES,
        stored_gib_per_hour=rate * work.trajectory_tokens * _STORED_BYTES * 3600 / 2**30,
        database_nodes=3,
    )


def _engine(model: PlannedModel, gpu: Gpu, tokens: int) -> tuple[int, float, int]:
    """Return (GPUs of an engine, its tokens/s, requests that its KV cache holds at their mean length).

    Decoding reads the weights once per step, and each request's KV cache. In a mixture of experts it reads
    all experts: a batch uses most of them.
    """
    weights = model.parameters * _ENGINE_BYTES
    entry = 2 * model.shape.layers * model.shape.kv_heads * model.shape.head_dim * _ENGINE_BYTES
    memory, ranks = gpu.memory_gib * 2**30 * _KV_SHARE, 1
    while ranks < 64 and memory * ranks - weights < entry * tokens + 0.2 * memory * ranks:
        ranks *= 2
    slots = min(_MOST_REQUESTS, max(1, int((memory * ranks - weights) / (entry * tokens / 2))))
    bandwidth = gpu.memory_gb_s * 1e9 * _BANDWIDTH_SHARE * ranks
    step = (weights + slots * entry * tokens / 2) / bandwidth
    compute = 2 * slots * model.shape.layer_weights / (gpu.tflops * 1e12 * _BANDWIDTH_SHARE * ranks)
    return ranks, slots / max(step, compute, _DECODE_SECONDS), slots


def _at(points: tuple[tuple[int, float], tuple[int, float]], tokens: float) -> float:
    """Return the value at ``tokens``, on the line through two measured points, not below the first."""
    (low, first), (high, second) = points
    return max(first, first + (second - first) * (tokens - low) / (high - low))


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
class FitVerdict:
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
    cluster: GpuCluster
    configs: Configs
    reference_parameters: int = 0
    """Numbers in the reference model of the loss, which is sharded like the policy."""
    critic_parameters: int = 0
    """Numbers in the critic's own model, which is trained and sharded like the policy."""
    verdicts: list[FitVerdict] = field(default_factory=list)
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
                verdict = FitVerdict(candidate=candidate, state="too large", memory=memory, reason=reason)
            elif len(fits) >= enough or (candidate.layout, candidate.checkpointing) in same:
                verdict = FitVerdict(candidate=candidate, state="slower", memory=memory)
            else:
                verdict = FitVerdict(candidate=candidate, state="fits", memory=memory)
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
        chunk = configs[TrainConfig].loss_seq_chunk_size or GPU_CHUNK
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
            critic=self.critic_parameters / self.model.parameters,
            fused_norms=self.cluster.gpu.fuses_norms,
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


def list_layouts(cluster: GpuCluster, configs: Configs) -> Iterator[Layout]:
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


def refusal(module: Any, layout: Layout, cluster: GpuCluster, configs: Configs, max_tokens: int) -> str:
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


NOTE = (
    "Memory follows closed forms; docs/sizing.md compares them with simulated steps, and with real ones on a"
    " CPU. Seconds are a roofline of data-sheet figures. Neither was measured on several GPUs."
)
_BFLOAT16 = (
    "The weights are trained in bfloat16, which rounds small updates away; plan --dtype float32 for weights"
    " and moments in float32."
)
_GIB = 2**30
_SHOWN_REFUSALS = 8
_SHORT = ("weights", "grads", "moments", "gathered", "activ.", "logits", "backward", "reference")
"""Headings of ``PARTS``."""


def command(search: Search, candidate: Candidate) -> str:
    """Return the command that trains with the candidate's layout."""
    layout, configs, cluster = candidate.layout, search.configs, search.cluster
    flags: dict[str, Any] = {
        "model_name_or_path": search.model.folder,
        "max_tokens": search.work.max_tokens,
        "groups_per_step": search.work.groups,
        "num_generations": search.work.group_size,
        **_call_limits(configs),
    }
    flags |= {
        f"{name}_size": getattr(layout, name)
        for name in DIMENSIONS
        if name != "dp_shard" and getattr(layout, name) > 1
    }
    if candidate.checkpointing != "none":
        flags["activation_checkpointing"] = candidate.checkpointing
    if candidate.reduction != "last":
        flags["gradient_reduction"] = candidate.reduction
    flags |= _given(configs)
    nodes = -(-cluster.count // cluster.per_node)
    launcher = ["accelerate", "launch", "--config_file", "assets/fsdp2_dst.yml"]
    launcher += ["--num_processes", str(cluster.count)]
    if nodes > 1:
        launcher += ["--num_machines", str(nodes), "--machine_rank", "RANK", "--main_process_ip", "ADDRESS"]
    return shlex.join([*launcher, "-m", "agentrl.train", "--run_name", "my_run", *flag_words(flags)])


def _call_limits(configs: Configs) -> dict[str, int]:
    """Return limits of a model call that let a trajectory grow to ``--context``, and no further."""
    new, context = configs[SamplingConfig].max_new_tokens, configs[PlanConfig].context
    if "max_new_tokens" not in configs.given:
        new = min(new, max(1, context // 4))
    prompt = max(1, context - new)
    if "max_prompt_tokens" in configs.given:
        prompt = min(prompt, configs[AgentConfig].max_prompt_tokens)
    return {"max_prompt_tokens": prompt, "max_new_tokens": new}


def _given(configs: Configs) -> dict[str, Any]:
    """Return the flags of the trainer that were given and that the plan took as they are."""
    planned = {"max_tokens", "groups_per_step", "activation_checkpointing", "gradient_reduction"}
    planned |= {f"{name}_size" for name in DIMENSIONS} | {"model_name_or_path", "gradient_checkpointing"}
    return {
        name: value
        for group in (
            ModelConfig,
            TrainConfig,
            MemoryConfig,
            AdapterConfig,
            LossConfig,
            OptimConfig,
            CriticConfig,
        )
        for name, value in vars(configs[group]).items()
        if name in configs.given and name not in planned
    }


def print_plan(console: Console, search: Search, services: PlannedServices | None) -> None:
    """Print the plan as text and tables."""
    work, gpu, model = search.work, search.cluster.gpu, search.model
    weights, products = _dtypes(search)
    console.print(
        f"{clean(model.folder)}: {type(model.module).__name__},"
        f" {model.parameters / 1e6:,.1f} million parameters, {weights} weights, {products} products,"
        f" context {model.context or 'unbounded'}\n"
        f"{search.cluster.count} × {gpu.name}, {search.limit / _GIB:.1f} of {gpu.memory_gib:g} GiB planned\n"
        f"step: {work.trajectories} trajectories of {work.trajectory_tokens} tokens in {work.turns} turns,"
        f" {work.computed_tokens} tokens computed, micro-batches of {work.max_tokens}"
    )
    if search.precision.weights == torch.bfloat16 and not search.configs[AdapterConfig].lora_rank:
        console.print(Text(_BFLOAT16))
    if search.reference_parameters:
        size = search.reference_parameters * search.precision.products.itemsize / _GIB
        console.print(Text(f"The reference model of the loss, {size:.2f} GiB, is sharded like the policy."))
    if search.critic_parameters:
        console.print(Text("The critic's own model is trained and sharded like the policy: weights, grads and"
                           " moments are of both."))  # fmt: skip
    if model.alone:
        console.print(Text(f"The model has {model.alone}: each sequence runs alone, and nothing is merged."))
    fits = _fitting(search)
    _print_fitting(console, search, fits)
    _print_others(console, search)
    if services is not None:
        _print_services(console, services, _turns(search, fits[0]))
    console.print(Text(NOTE, "italic"))


def _fitting(search: Search) -> list[FitVerdict]:
    return [verdict for verdict in search.verdicts if verdict.state == "fits"]


def _print_fitting(console: Console, search: Search, fits: list[FitVerdict]) -> None:
    if not fits:
        console.print(Text("No layout fits.", "bold red"))
        return
    named = [[name_of(item.candidate.layout), item.candidate.checkpointing] for item in fits]
    rows = [
        [*name, item.candidate.reduction, f"{item.candidate.time.total:.1f}", _gib(item.memory.peak)]
        for name, item in zip(named, fits, strict=True)
    ]
    columns = ["layout", "checkpointing"]
    console.print(
        table(
            "Layouts that fit, by estimated seconds of a step; GiB of the rank that needs most",
            [*columns, "gradient reduction", "seconds", "peak GiB"],
            rows,
            text=3,
        )
    )
    parts = [
        [*name, *(_gib(item.memory.parts.get(part, 0)) for part in PARTS)]
        for name, item in zip(named, fits, strict=True)
    ]
    console.print(table("Parts of the peak in GiB", [*columns, *_SHORT], parts, text=2))
    for item in fits:
        console.print(Text(name_of(item.candidate.layout), "bold"))
        console.print(command(search, item.candidate), soft_wrap=True)


def _print_others(console: Console, search: Search) -> None:
    others = [item for item in search.verdicts if item.state == "too large"]
    rows = [
        [name_of(item.candidate.layout), item.candidate.checkpointing, item.candidate.reduction, item.reason]
        for item in others[:_SHOWN_REFUSALS]
    ]
    rows += [
        [f"{name_of(layouts[0])}{_more(len(layouts))}", "", "", reason]
        for reason, layouts in list(search.refused.items())[:_SHOWN_REFUSALS]
    ]
    if rows:
        console.print(
            table("Layouts that do not", ["layout", "checkpointing", "reduction", "why"], rows, text=4)
        )
    counts: Counter[str] = Counter(item.state for item in search.verdicts)
    counts["refused"] += sum(len(layouts) for layouts in search.refused.values())
    console.print("layouts with flags: " + ", ".join(f"{count} {state}" for state, count in counts.items()))


def _turns(search: Search, fitting: FitVerdict) -> dict[str, float] | None:
    """Return the GiB of a GPU that an engine and the step use in turns; None without ``--colocate true``.

    The larger one has to fit, not their sum.
    """
    config = search.configs[EngineConfig]
    if not config.is_colocated:
        return None
    engine = search.cluster.gpu.memory_gib * (config.inf_mem_ratio or COLOCATED_MEMORY)
    step = fitting.memory.peak / _GIB
    return {"engine": engine, "step": step, "in_turns": max(engine, step), "at_once": engine + step}


def _print_services(console: Console, found: PlannedServices, turns: dict[str, float] | None) -> None:
    one_device = [] if turns is None else [
        ["one device", "the engine's {engine:.1f} GiB and the step's {step:.1f} in turns (--colocate):"
         " {in_turns:.1f} of a GPU, not {at_once:.1f}".format(**turns)],
    ]  # fmt: skip
    rows = [
        *one_device,
        ["trajectories", f"{found.trajectories_per_second:.2f}/s, {found.in_flight} at the same time"],
        ["samplers", f"{found.samplers} processes ({found.sampler_cores:.2f} cores of work for"
         f" {found.turns_per_second:.1f} turns/s, {found.sampler_memory_gib:.1f} GiB)"],
        ["engines", f"{found.engines} × {found.engine_tp} {found.engine_gpu} (roofline:"
         f" {found.engine_tokens_per_second:.0f} tokens/s each; {found.generated_per_second:.0f} needed)"],
        ["gateways", f"{found.gateway_cores:.2f} cores of work if all calls go through them"],
        ["database", f"{found.database_nodes} nodes (1 without redundancy), {found.mongod_cores:.2f} cores of"
         f" work, {found.stored_gib_per_hour:.1f} GiB an hour"],
    ]  # fmt: skip
    console.print(table("Services that keep the first layout busy", ["service", "size"], rows, text=2))


def _dtypes(search: Search) -> tuple[str, str]:
    """Return the names of the dtypes of weights and of products."""
    precision = search.precision
    weights, products = (str(item).removeprefix("torch.") for item in (precision.weights, precision.products))
    return weights, products


def plan_json(search: Search, services: PlannedServices | None) -> dict[str, Any]:
    """Return the plan as JSON: bytes, seconds, and layouts by dimension."""
    work, model, cluster = search.work, search.model, search.cluster
    weights, products = _dtypes(search)
    return {
        "model": {
            "folder": str(model.folder), "parameters": model.parameters,
            "expert_parameters": model.expert_parameters, "dtype": weights, "products": products,
            "context": model.context,
        },
        "gpus": {**asdict(cluster.gpu), "count": cluster.count, "planned_bytes": search.limit},
        "step": asdict(work),
        "layouts": [_verdict_json(search, item) for item in search.verdicts],
        "refused": [
            {"reason": reason, "layouts": [_sizes(layout) for layout in layouts]}
            for reason, layouts in search.refused.items()
        ],
        "services": None if services is None else asdict(services),
        "turns": None if services is None else _turns(search, _fitting(search)[0]),
        "note": NOTE,
    }  # fmt: skip


def _verdict_json(search: Search, item: FitVerdict) -> dict[str, Any]:
    candidate, memory = item.candidate, item.memory
    return {
        "layout": _sizes(candidate.layout),
        "activation_checkpointing": candidate.checkpointing,
        "gradient_reduction": candidate.reduction,
        "state": item.state,
        "reason": item.reason,
        "seconds": candidate.time.total,
        "seconds_by_part": asdict(candidate.time),
        "peak_bytes": memory.peak,
        "bytes_by_part": dict(memory.parts),
        "command": command(search, candidate) if item.state == "fits" else None,
    }


def _sizes(layout: Any) -> dict[str, int]:
    return dict(zip(DIMENSIONS, layout.sizes, strict=True))


def _gib(value: int) -> str:
    return f"{value / _GIB:.2f}"


def _more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""
