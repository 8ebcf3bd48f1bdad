"""A program for torchrun: experts split over two processes, against whole ones in one process.

    torchrun --nproc_per_node 2 tests/core/integration/distributed/sharded_experts.py

Rank 0 prints a line for each: kinds of experts and what computes them, whatever the routing, over ep and
over tp; and a step of a model whose activations are recomputed.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import CASES, build_parallel, build_trainer, compare_step, compare_weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

sys.path.insert(0, str(Path(__file__).parents[3]))
from tiny_models import tiny_model

from agentrl.distributed.expert_parallel import shard_experts
from agentrl.distributed.mesh import Layout, Mesh, build_mesh, leave_processes
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.train.build import enable_checkpointing

LIMIT = 1e-5
EXPERTS, CHOICES, WIDTH = 4, 2, 16
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
ROUTINGS = {"any": range(EXPERTS), "first": range(2), "last": range(2, 4)}
"""Experts that tokens choose from: with the first or the last alone, one process gets no token."""
KINDS: dict[str, Callable[[], nn.Module]] = {
    "Qwen3-MoE": lambda: Qwen3MoeExperts(
        Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=8, num_experts=EXPERTS)
    ),
    "Qwen2-MoE": lambda: Qwen2MoeExperts(
        Qwen2MoeConfig(hidden_size=WIDTH, moe_intermediate_size=8, num_experts=EXPERTS)
    ),
    "Mixtral": lambda: MixtralExperts(
        MixtralConfig(hidden_size=WIDTH, intermediate_size=8, num_local_experts=EXPERTS)
    ),
    "OLMoE": lambda: OlmoeExperts(
        OlmoeConfig(hidden_size=WIDTH, intermediate_size=8, num_experts=EXPERTS)
    ),
    "DeepSeek-V3": lambda: DeepseekV3Experts(
        DeepseekV3Config(hidden_size=WIDTH, moe_intermediate_size=8, n_routed_experts=EXPERTS)
    ),
    "GPT-OSS": lambda: GptOssExperts(
        GptOssConfig(hidden_size=WIDTH, intermediate_size=8, num_local_experts=EXPERTS)
    ),
}  # fmt: skip


def experts_of(kind: str, implementation: str) -> Any:
    """Random experts, the same on every process."""
    torch.manual_seed(0)
    module = KINDS[kind]()
    module.config._experts_implementation = implementation
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def inputs(seed: int, routing: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, their experts and weights, and what their results are multiplied with: 5, 6, … tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens, open_to = 5 + seed, torch.tensor(ROUTINGS[routing])
    order = torch.rand(tokens, len(open_to), generator=generator).argsort(1)[:, :CHOICES]
    hidden, probe = (torch.randn(tokens, WIDTH, generator=generator) for _ in range(2))
    weights = torch.rand(tokens, CHOICES, generator=generator)
    return hidden.requires_grad_(), open_to[order], weights.requires_grad_(), probe


def run(module: Any, seed: int, routing: str) -> list[Tensor]:
    """Result, and gradients of tokens and weights; those of parameters are added to."""
    hidden, index, weights, probe = inputs(seed, routing)
    result = module(hidden, index, weights)
    (result * probe).sum().backward()
    return [result.detach(), *(tensor.grad for tensor in (hidden, weights) if tensor.grad is not None)]


def deviation(mesh: Mesh, kind: str, implementation: str, routing: str) -> float:
    """The largest difference of a result or gradient; inf where a process holds more than its share."""
    whole = experts_of(kind, implementation)
    shared = nn.ModuleDict({"experts": copy.deepcopy(whole)})
    shard_experts(shared, mesh)
    count = mesh.layout.data
    expected = [run(whole, seed, routing) for seed in range(count)][mesh.data_rank]
    pairs = list(zip(run(shared["experts"], mesh.data_rank, routing), expected, strict=True))
    for found, plain in zip(shared.parameters(), whole.parameters(), strict=True):
        if not isinstance(found, DTensor) or found.to_local().numel() * 2 != plain.numel():
            return float("inf")
        pairs.append((found.grad.full_tensor(), plain.grad))  # type: ignore[union-attr]
    return max(float((found - plain).abs().max()) for found, plain in pairs)


def modules() -> Iterator[tuple[str, float]]:
    """Each kind of experts over ep and over tp: the worst of all implementations and routings."""
    for layout, kind in itertools.product((Layout(ep=2), Layout(tp=2)), KINDS):
        mesh = build_mesh(layout, "cpu")
        tried = itertools.product(IMPLEMENTATIONS, ROUTINGS)
        yield f"{kind} ep {layout.ep} tp {layout.tp}", max(deviation(mesh, kind, *how) for how in tried)


def recomputed() -> Iterator[tuple[str, float]]:
    """Two steps of a model over ep whose layers run again in the backward."""
    for mode, implementation in itertools.product(("full", "selective"), IMPLEMENTATIONS):
        model = tiny_model("qwen3_moe", vocab_size=64)
        model.set_experts_implementation(implementation)
        alone = build_trainer(ParallelModel(copy.deepcopy(model)), CASES["ep2"])
        enable_checkpointing(model, mode)  # type: ignore[arg-type]
        together = build_parallel(model, CASES["ep2"])
        worst = max(value for step in range(2) for value in compare_step(alone, together, step).values())
        yield f"{mode} recomputation, {implementation}", max(worst, compare_weights(alone, together))


def main() -> int:
    """Print a line for each comparison."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    good = True
    try:
        for name, value in itertools.chain(modules(), recomputed()):
            worst = torch.tensor(value)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            is_good = float(worst) <= LIMIT
            good = good and is_good
            if dist.get_rank() == 0:
                print(f"{name:<36} {float(worst):.1e}  {'ok' if is_good else 'FAILED'}", flush=True)
    finally:
        leave_processes()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
