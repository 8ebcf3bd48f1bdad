"""Compare our exchange of tokens between experts with transformers' ``AllToAllEP``: bytes and CPU seconds.

    python scripts/bench/experts.py                 tp 2, ep 2, and ep 2 with tp 2, on gloo ranks
    python scripts/bench/experts.py --quick         ep 2 alone

Both run the experts of one Qwen3-MoE layer (64 experts, 8 for each token) forward and backward on the same
tokens and routes, and their results and gradients are compared. Bytes are those that a rank sends to
others, counted call by call (an all-reduce as a ring, 2 (n - 1) / n of its tensor). Prints a line for each
layout, with the ratio of transformers' figures to ours, and exits with 1 if the two differ by more than 1e-4.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from harness import bench_parser, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _resolve_process_group,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig
from transformers.distributed.expert_parallel import AllToAllEP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from agentrl.distributed.expert_parallel import Dispatch

TOKENS, HIDDEN, WIDTH, EXPERTS, CHOSEN = 512, 256, 128, 64, 8
LAYOUTS = {"tp 2": (1, 2), "ep 2": (2, 1), "ep 2 × tp 2": (2, 2)}
"""(ep, tp) of each layout."""
ROUNDS = 5


class SentBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that this rank sends to other ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace in ("c10d", "_c10d_functional"):
            self.total += _sent(name, args)
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> float:
    """Return the bytes that one collective sends from this rank; 0 for a wait."""
    if name == "alltoall_base_":  # output, input, group, output sizes, input sizes
        group = dist.ProcessGroup.unbox(args[2])
        tensor, sizes = args[1], args[4] or [len(args[1]) // group.size()] * group.size()
        return float((len(tensor) - sizes[group.rank()]) * tensor[:1].numel() * tensor.element_size())
    if name == "all_to_all_single":  # input, output sizes, input sizes, group name
        tensor, sizes = args[0], args[2]
        own = _resolve_process_group(args[3]).rank()
        return float((len(tensor) - sizes[own]) * tensor[:1].numel() * tensor.element_size())
    if name in ("all_reduce", "all_reduce_"):
        ranks = _resolve_process_group(args[2]).size()
        return float(2 * (ranks - 1) / ranks * args[0].numel() * args[0].element_size())
    if name == "all_gather_into_tensor":  # input, ranks, group name
        return float((args[1] - 1) * args[0].numel() * args[0].element_size())
    if name not in ("wait_tensor", "_wrap_tensor_autograd"):
        raise ValueError(f"{name} is not counted: add it to _sent")
    return 0.0


Found = tuple[dict[str, tuple[float, float]], float]
"""{way: (bytes sent, CPU seconds)}, and the largest relative difference between the two ways."""


def run_rank(rank: int, world: int, ep: int, tp: int, folder: str) -> Found:
    """Run both exchanges on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp"))
    flat = mesh["ep", "tp"]._flatten("experts")
    count = EXPERTS // (ep * tp)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=count, num_experts_per_tok=1
    )
    config._experts_implementation = "grouped_mm"
    experts: Any = cast(Any, Qwen3MoeExperts)(config)
    torch.manual_seed(rank)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    ours = Dispatch(mesh["ep"], mesh["tp"], count)
    theirs = cast(Any, AllToAllEP)(experts, flat, mesh["tp"])
    ways: dict[str, Any] = {"ours": partial(ours, run=experts.forward), "transformers": theirs}
    torch.manual_seed(100 + rank // tp)  # ranks of tp have the same tokens
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    routed = torch.randn(TOKENS, EXPERTS).softmax(1).topk(CHOSEN)
    index, weights = routed.indices, routed.values.requires_grad_()
    figures, values = {}, {}
    for name, way in ways.items():
        with SentBytes() as sent:
            output = way(hidden, index, weights)
            gradients = torch.autograd.grad(output.square().sum(), [hidden, weights, *experts.parameters()])
        values[name] = [output.detach(), *gradients]
        started = time.process_time()
        for _ in range(ROUNDS):
            torch.autograd.grad(way(hidden, index, weights).square().sum(), [hidden, *experts.parameters()])
        figures[name] = (sent.total, (time.process_time() - started) / ROUNDS)
    pairs = zip(*values.values(), strict=True)
    apart = max(float((one - other).norm() / one.norm()) for one, other in pairs)
    dist.destroy_process_group()
    return figures, apart


def main() -> int:
    """Print a line for each layout; return 1 if the two ways differ."""
    parser = bench_parser(__doc__)
    layouts = {"ep 2": LAYOUTS["ep 2"]} if parser.parse_args().quick else LAYOUTS
    print(
        f"{TOKENS} tokens a rank, hidden size {HIDDEN}, {EXPERTS} experts, {CHOSEN} for each token, float32"
    )
    worst = 0.0
    for name, (ep, tp) in layouts.items():
        with tempfile.TemporaryDirectory() as folder:  # forked ranks share what is imported
            figures, apart = run_ranks(run_rank, ep * tp, ep, tp, folder)[0]
        (ours, our_cpu), (theirs, their_cpu) = figures["ours"], figures["transformers"]
        print(
            f"{name:12} sent {ours / 2**20:.2f} MiB, transformers {theirs / 2**20:.2f}"
            f" ({theirs / ours:.2f} x);"
            f" CPU {our_cpu:.3f} s, transformers {their_cpu:.3f} ({their_cpu / our_cpu:.2f} x);"
            f" apart {apart:.1e}",
            flush=True,
        )
        worst = max(worst, apart)
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
