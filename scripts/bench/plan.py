"""Compare the memory that ``agentrl plan`` computes with that of real training steps on gloo processes.

    python scripts/bench/plan.py                                 tiny and 135M models, six layouts each
    python scripts/bench/plan.py --models tiny --layouts fsdp2 tp2
    python scripts/bench/plan.py --tokens 512
    python scripts/bench/plan.py --quick                         the tiny model, one layout

Each layout trains two steps in its processes, with random weights of the model's configuration. Measured is
the second step of the rank that needs most: the parameters and moments that are alive before it, plus the
largest number of bytes that torch's CPU allocator has handed out at once during it (torch's profiler). Gloo's
buffers, and scratch memory that kernels take elsewhere, are not in it; the growth of the peak resident memory
is printed beside it. Prints a line per layout; exits with 1 if one is off by more than 10 %.
"""

from __future__ import annotations

import math
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import bench_parser, run_ranks
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from agentrl.distributed.expert_parallel import Dispatch
from agentrl.distributed.mesh import Layout, build_mesh, leave_processes
from agentrl.distributed.parallel_model import parallelize
from agentrl.model.flops import Precision
from agentrl.train.optimizer import build_optimizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from fake_gpu.rank_step import StepSpec, add_gradients, build_model, local_tensor, planned_memory
from peak_memory import peak_allocated

LIMIT = 0.10
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A layout, and the kind of model that it splits."""

    sizes: dict[str, int]
    kind: str = "dense"
    balanced: bool = False
    """Whether each expert gets equally many tokens, as the plan assumes, whatever the router chooses."""


CASES = {
    "one process": Case({}),
    "fsdp2": Case({"dp_shard": 2}),
    "tp2": Case({"tp": 2}),
    "tp3": Case({"tp": 3}),
    "cp2": Case({"cp": 2}),
    "pp2": Case({"pp": 2}),
    "replicate2": Case({"dp_replicate": 2}),
    "fsdp2×tp2": Case({"dp_shard": 2, "tp": 2}),
    "ep2": Case({"ep": 2}, "experts", balanced=True),
    "ep2 routed": Case({"ep": 2}, "experts"),
}
DEFAULT = {
    "tiny": ("one process", "fsdp2", "tp2", "cp2", "pp2", "ep2"),
    "135M": ("one process", "fsdp2", "tp3", "cp2", "pp2", "replicate2"),
}
"""SmolLM2-135M has 9 heads over 3, and no experts."""
TOKENS = {"tiny": 1024, "135M": 128}


def model_config(model: str, kind: str) -> Any:
    """Return the configuration of the quickstart's tiny model or of SmolLM2-135M, or one with experts."""
    if model == "135M":
        return LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
            tie_word_embeddings=True, rope_theta=100000.0,
        )  # fmt: skip
    tiny = {
        "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    if kind == "experts":
        return Qwen3MoeConfig(**tiny, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)
    return Qwen3Config(**tiny)


def step_spec(model: str, kind: str, tokens: int, checkpointing: str) -> Any:
    """Return the step that is planned and measured: two micro-batches of two chains, half of it trained."""
    return StepSpec(
        config=model_config(model, kind), precision=Precision(), max_tokens=tokens, chain_tokens=tokens // 2,
        trained_tokens=tokens // 2, micro_batches=2, checkpointing=checkpointing, on_gpu=False,
        fused_norms=False,
    )  # fmt: skip


def measure_rank(
    rank: int, world: int, store: Path, name: str, model: str, tokens: int, checkpointing: str
) -> dict[str, float]:
    """Train two steps as one rank; return bytes of the second one."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    case = CASES[name]
    spec, layout = step_spec(model, case.kind, tokens, checkpointing), Layout(**case.sizes)
    if case.balanced:
        Dispatch.plan = _balanced(Dispatch.plan)  # in a process of its own
    torch.manual_seed(0)
    parallel = parallelize(build_model(spec), build_mesh(layout, "cpu"), max_tokens=tokens)
    optimizer = build_optimizer(parallel.model, spec.optim, spec.memory)
    forests = [spec.forest()] * spec.micro_batches

    def step() -> None:
        add_gradients(parallel, spec, forests)
        parallel.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    held = [*parallel.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    storages = {item.untyped_storage()._cdata: item.untyped_storage() for item in map(local_tensor, held)}
    before = sum(storage.nbytes() for storage in storages.values())
    resident = _resident()
    peak = before + peak_allocated(step)
    found = {"peak": float(peak), "grown": float(max(0, _peak_resident() - resident))}
    if world > 1:
        dist.barrier()
        leave_processes()
    return found


def run_case(name: str, model: str, tokens: int, checkpointing: str, folder: Path) -> dict[str, float]:
    """Measure one layout in processes of its own, forked from this one; return the rank that needs most."""
    world = math.prod(CASES[name].sizes.values())
    found = run_ranks(measure_rank, world, folder / f"{model}-{name}", name, model, tokens, checkpointing)
    return max(found, key=lambda item: item["peak"])


def main() -> int:
    """Compare the layouts that the command line names."""
    parser = bench_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["tiny", "135M"], choices=["tiny", "135M"])
    parser.add_argument("--layouts", nargs="+", choices=list(CASES), help="default: six by model")
    parser.add_argument("--tokens", type=int, help="tokens of a micro-batch (default: by model)")
    parser.add_argument("--checkpointing", default="none", choices=["none", "selective", "full"])
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.layouts, arguments.tokens = ["tiny"], ["tp2"], 1024

    cases = [(model, name) for model in arguments.models for name in arguments.layouts or DEFAULT[model]]
    sizes = {model: arguments.tokens or TOKENS[model] for model in arguments.models}
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # first, because a process that has run backwards cannot fork
        measured = {
            (model, name): run_case(name, model, sizes[model], arguments.checkpointing, Path(folder))
            for model, name in cases
        }
    print(
        "| model | layout | measured MiB | planned MiB | planned / measured | resident memory grew by MiB |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    good = True
    for model, name in cases:
        case, found = CASES[name], measured[model, name]
        spec = step_spec(model, case.kind, sizes[model], arguments.checkpointing)
        planned = planned_memory(spec, Layout(**case.sizes)).peak
        ratio = planned / found["peak"]
        good &= abs(ratio - 1) <= LIMIT
        print(
            f"| {model} | {name} | {found['peak'] / MIB:.1f} | {planned / MIB:.1f} | {ratio:.3f}"
            f" | {found['grown'] / MIB:.0f} |",
            flush=True,
        )
    return 0 if good else 1


def _balanced(plan: Any) -> Any:
    """Make ``Dispatch.plan`` deal the pairs of a token and an expert to all experts in turn."""

    def balanced(dispatch: Dispatch, index: torch.Tensor) -> Any:
        experts = dispatch.count * dispatch.ep.size() * dispatch.tp.size()
        return plan(dispatch, torch.arange(index.numel()).remainder(experts).view_as(index))

    return balanced


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
