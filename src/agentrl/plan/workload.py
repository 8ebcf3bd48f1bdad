"""What a plan is for: the GPUs of a cluster, and the data of one optimizer step."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from agentrl.config.load import Configs
from agentrl.config.schema import OptimConfig, TaskConfig, TrainConfig
from agentrl.config.training import PlanConfig
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU, from its data sheet."""

    name: str
    memory_gib: float
    """What a process can allocate, in GiB; a little below the marketed size."""
    tflops: float
    """Dense bfloat16 products, in 10¹² FLOP/s."""
    memory_gb_s: float
    """Bandwidth of its memory, in GB/s."""
    link_gb_s: float
    """Bandwidth to another GPU of the same node, in one direction, in GB/s."""


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="B200", memory_gib=178.0, tflops=2250.0, memory_gb_s=8000.0, link_gb_s=900.0),
        Gpu(name="H200", memory_gib=139.0, tflops=989.0, memory_gb_s=4800.0, link_gb_s=450.0),
        Gpu(name="H100", memory_gib=79.0, tflops=989.0, memory_gb_s=3350.0, link_gb_s=450.0),
        Gpu(name="H800", memory_gib=79.0, tflops=989.0, memory_gb_s=3350.0, link_gb_s=200.0),
        Gpu(name="H20", memory_gib=95.0, tflops=148.0, memory_gb_s=4000.0, link_gb_s=450.0),
        Gpu(name="A100", memory_gib=79.0, tflops=312.0, memory_gb_s=2039.0, link_gb_s=300.0),
        Gpu(name="A100-40GB", memory_gib=39.4, tflops=312.0, memory_gb_s=1555.0, link_gb_s=300.0),
        Gpu(name="L40S", memory_gib=44.4, tflops=362.0, memory_gb_s=864.0, link_gb_s=32.0),
        Gpu(name="L4", memory_gib=22.0, tflops=121.0, memory_gb_s=300.0, link_gb_s=32.0),
        Gpu(name="A10G", memory_gib=22.0, tflops=70.0, memory_gb_s=600.0, link_gb_s=32.0),
        Gpu(name="4090", memory_gib=23.5, tflops=165.2, memory_gb_s=1008.0, link_gb_s=32.0),
        Gpu(name="MI300X", memory_gib=191.0, tflops=1307.4, memory_gb_s=5300.0, link_gb_s=448.0),
    )
}  # fmt: skip
"""By the name that ``--gpus`` takes. Figures without sparsity, from the vendors' data sheets."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The GPUs that a trainer gets."""

    gpu: Gpu
    count: int
    per_node: int
    """GPUs of one machine, which its fast links join."""
    network_gb_s: float
    """Bandwidth between machines per GPU, in one direction, in GB/s."""

    def link_gb_s(self, span: int) -> float:
        """Return the bandwidth among ranks of which the farthest two are ``span`` ranks apart."""
        return self.gpu.link_gb_s if span <= self.per_node else min(self.gpu.link_gb_s, self.network_gb_s)


def parse_gpus(
    text: str, *, memory_gib: float | None = None, per_node: int = 8, network_gbps: float = 400.0
) -> Cluster:
    """Read ``8xH100``, ``H100`` or ``16 x H200``; ``memory_gib`` replaces the memory of the kind.

    Raises ConfigError for a number below 1 and for a kind that is unknown.
    """
    found = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?([A-Za-z0-9-]+)\s*", text)
    if found is None or int(found[1] or 1) < 1:
        raise ConfigError(f"--gpus is {text!r}", hint="write a number and a kind, e.g. 8xH100")
    gpu = _kind(found[2], memory_gib)
    if memory_gib is not None:
        gpu = replace(gpu, memory_gib=memory_gib)
    count = int(found[1] or 1)
    return Cluster(gpu=gpu, count=count, per_node=min(per_node, count), network_gb_s=network_gbps / 8)


def _kind(name: str, memory_gib: float | None) -> Gpu:
    plain = re.sub(r"[^A-Z0-9]", "", name.upper().removeprefix("RTX"))
    for key, gpu in GPUS.items():
        if re.sub(r"[^A-Z0-9]", "", key.upper()) in (plain, plain.removesuffix("80GB")):
            return gpu
    hint = f"use one of {', '.join(GPUS)}"
    if memory_gib is None:
        hint += "; for another kind name the most similar one, and its memory in --gpu_memory_gib"
    raise ConfigError(f"--gpus: {name!r} is unknown", hint=hint)


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
