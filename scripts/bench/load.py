"""Measure the host memory of each rank while several gloo ranks load one model: by shards, and whole.

    python scripts/bench/load.py                            SmolLM2-135M's shape, eight ranks, FSDP2
    python scripts/bench/load.py --shape 1.4B --ways shards
    python scripts/bench/load.py --shape moe --ep_size 4
    python scripts/bench/load.py --quick                    a tiny shape, one rank, by shards

Writes random bfloat16 weights, and starts the ranks once for each way: ``shards`` as the trainer loads, into
float32; ``transformers`` is its own sharded reader, ``from_pretrained(distributed_config=)``, for FSDP2 and
tensor parallelism; ``whole`` is the baseline, ``from_pretrained`` on every rank, which then keeps its part
(one rank after the other, so that the machine needs to hold one whole model). Peaks are the process's own
(VmHWM), the size of what it has imported included. Prints a line per rank, and exits with 1 if a rank that
loads by shards takes more than 1.2 × its shard + 2 GiB.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import bench_parser, run_ranks
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from agentrl.config.schema import ModelConfig, TrainConfig
from agentrl.distributed.load_shards import load_shards
from agentrl.distributed.mesh import build_mesh, leave_processes, plan_layout
from agentrl.distributed.parallel_model import parallelize
from agentrl.model.check_model import check_model
from agentrl.model.load import empty_model, load_model

MIB, GIB = 2**20, 2**30
SHAPES: dict[str, Any] = {
    "tiny": LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "135M": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    ),
    "1.4B": Qwen3Config(
        vocab_size=65536, hidden_size=2048, intermediate_size=6144, num_hidden_layers=26, head_dim=128,
        num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True,
    ),
    "moe": Qwen3MoeConfig(
        vocab_size=65536, hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=4, num_experts=64, num_experts_per_tok=8,
    ),
}  # fmt: skip
WAYS = ("whole", "shards", "transformers")


@dataclass(frozen=True)
class Loaded:
    """What a rank has after loading, in bytes and seconds."""

    rank: int
    shard: int
    before: int
    """Resident memory before loading."""
    peak: int
    """Largest resident memory of the process."""
    seconds: float

    @property
    def is_within(self) -> bool:
        """Whether the peak is at most 1.2 × the shard + 2 GiB."""
        return self.peak <= 1.2 * self.shard + 2 * GIB


def memory(key: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process in bytes. (``ru_maxrss`` starts with its parent's.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def load(way: str, folder: Path, layout: TrainConfig) -> Any:
    """Load the model in ``folder`` in this rank's process; every rank calls it."""
    world, config = dist.get_world_size(), ModelConfig(model_name_or_path=str(folder))
    mesh = build_mesh(plan_layout(layout, world), "cpu")
    if way == "shards":
        model: Any = empty_model(folder, config, torch.float32)
        check_model(model)
        parallelize(model, mesh, max_tokens=1024)
        load_shards(model, folder, torch.device("cpu"), config)
        return model
    if way == "transformers":
        sizes = DistributedConfig(tp_size=layout.tp_size, fsdp_size=world // layout.tp_size)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=sizes)
    for turn in range(world):
        if turn == dist.get_rank():
            model = load_model(folder, config, torch.float32)
            check_model(model)
            if mesh.layout.ep * mesh.layout.tp == 1:
                parallelize(model, mesh, max_tokens=1024)
        dist.barrier()
    return model


def run_rank(rank: int, world: int, way: str, folder: Path, layout: TrainConfig) -> Loaded:
    """Load as one rank, and return what that took."""
    torch.set_num_threads(1)
    # transformers reads these
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/{way}", rank=rank, world_size=world)
    before, start = memory("VmRSS"), time.perf_counter()
    model = load(way, folder, layout)
    seconds = time.perf_counter() - start
    held = [value.to_local() if isinstance(value, DTensor) else value for value in model.parameters()]
    found = Loaded(rank, sum(value.nbytes for value in held), before, memory("VmHWM"), seconds)
    del model, held
    leave_processes()
    return found


def print_way(way: str, found: list[Loaded]) -> None:
    """Print a line per rank."""
    print(
        f"\n{way:<12}{'shard':>6}{'before':>10}{'peak':>10}{'growth':>10}{'÷ shard':>10}{'limit':>10}{'s':>8}"
    )
    for item in found:
        growth, limit = item.peak - item.before, 1.2 * item.shard + 2 * GIB
        sizes = "".join(f"{value / MIB:>10.0f}" for value in (item.shard, item.before, item.peak, growth))
        print(
            f"rank {item.rank:<3}{sizes}{growth / item.shard:>10.2f}{limit / MIB:>10.0f}{item.seconds:>8.1f}"
        )


def main() -> int:
    """Measure the ways that the command line names."""
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=[*SHAPES], default="135M")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    for name in ("tp_size", "pp_size", "ep_size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    given = parser.parse_args()
    if given.quick:
        given.shape, given.ranks, given.ways = "tiny", 1, ["shards"]
    layout = TrainConfig(tp_size=given.tp_size, pp_size=given.pp_size, ep_size=given.ep_size)
    if "whole" in given.ways and given.tp_size * given.ep_size > 1:
        parser.error("whole: ranks load one after the other, and a split by tp or ep needs all of them")
    if "transformers" in given.ways and given.pp_size * given.ep_size > 1:
        parser.error("transformers: it is measured with FSDP2 and tensor parallelism")
    with tempfile.TemporaryDirectory(prefix="agentrl-load-") as name:
        folder = Path(name)
        build: Any = AutoModelForCausalLM.from_config
        model = build(SHAPES[given.shape], dtype=torch.bfloat16)
        model.save_pretrained(folder)
        print(f"{given.shape}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, MiB")
        del model
        # A fork's peak counts what this process has imported, so that only a quick form may fork.
        method = "fork" if given.quick else "spawn"
        results = {
            way: run_ranks(run_rank, given.ranks, way, folder, layout, method=method) for way in given.ways
        }
    for way, found in results.items():
        print_way(way, found)
    growth = {way: max(item.peak - item.before for item in found) for way, found in results.items()}
    for way in growth.keys() - {"shards"} if "shards" in growth else ():
        print(f"\nlargest growth, shards ÷ {way}: {growth['shards'] / growth[way]:.2f}")
    return 0 if all(item.is_within for item in results.get("shards", [])) else 1


if __name__ == "__main__":
    sys.exit(main())
