"""Bound the speed of a training step on GPUs that are not there: the highest MFU, and what stands below it.

    python scripts/bench/roofline.py                        all cases
    python scripts/bench/roofline.py --only "8B fsdp8"      one case
    python scripts/bench/roofline.py --kernels 40           and the kernels that take longest
    python scripts/bench/roofline.py --quick                a small model, one case

Each case runs the trainer's own step of one rank on fake CUDA tensors (tests/fake_gpu), with one layer and
with two, and counts its operations: FLOPs, bytes, exchanges. Those of all layers and of all micro-batches
follow, as each layer and each micro-batch does the same. Needs ``g++``, and no GPU.

A kernel takes as long as its FLOPs at the peak, as its bytes at the memory's bandwidth, or as its launch,
whichever is longest. Layers' weights and gradients are exchanged beside the computation, everything else
between. ``usual`` is the same at an assumed share of the data sheet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_check_child import SHAPES
from harness import bench_parser

from agentrl.config.schema import MemoryConfig
from agentrl.distributed.mesh import Layout
from agentrl.model.attention import BLOCK, block_kinds, padded_ends
from agentrl.model.flops import ModelShape, Precision, attention_pairs

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from fake_gpu.fake_cuda import compile_guard
from fake_gpu.fake_step import measure
from fake_gpu.kernels import Kernel, Kernels
from fake_gpu.rank_step import StepSpec, planned_memory

TRAJECTORIES, CONTEXT, TRAINED_SHARE = 64, 8192, 0.5
"""Of a step; no two of them share a prefix."""
PEAK, FLOAT32_PEAK, MEMORY, LINK = 989e12, 67e12, 3.35e12, 450e9
"""Data sheet of an H100 SXM: FLOP/s dense in bfloat16 and in float32, bytes/s of memory and of NVLink."""
LAUNCH = 5e-6
"""Seconds that the host takes to start a kernel."""
USUAL = {"products": 0.75, "attention": 0.4, "memory": 0.85, "exchange": 0.8}
"""An assumed share of the data sheet: large products, FlexAttention in Triton, copies, NCCL. Not measured."""
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model on a layout of H100s."""

    shape: str
    sizes: dict[str, int] = field(default_factory=dict)
    checkpointing: str = "full"
    tokens: int = 32_768
    layers: int = 0
    """0: all."""

    def spec(self, layers: int = 0) -> StepSpec:
        """Return one micro-batch of ``layers`` layers."""
        kind, sizes = SHAPES[self.shape]
        config = kind(**sizes | {"num_hidden_layers": layers or self.layers or sizes["num_hidden_layers"]})
        return StepSpec(
            config=config, precision=Precision(products=torch.bfloat16), max_tokens=self.tokens,
            chain_tokens=min(CONTEXT, self.tokens), trained_tokens=round(self.tokens * TRAINED_SHARE),
            checkpointing=self.checkpointing,  # type: ignore[arg-type]
            memory=MemoryConfig(gradient_reduction="every"),
        )  # fmt: skip

    @property
    def layout(self) -> Layout:
        """The ranks."""
        return Layout(**self.sizes)

    @property
    def micro_batches(self) -> int:
        """Of a rank in a step."""
        return max(1, TRAJECTORIES * CONTEXT // (self.tokens * self.layout.data))


CASES = {
    "8B one GPU": Case("8B", layers=10),
    "8B fsdp8": Case("8B", {"dp_shard": 8}),
    "8B fsdp8 selective": Case("8B", {"dp_shard": 8}, "selective", 8192),
    "8B fsdp4×tp2": Case("8B", {"dp_shard": 4, "tp": 2}, "none", 8192),
    "30B-A3B ep8": Case("MoE", {"ep": 8}),
    "30B-A3B fsdp8": Case("MoE", {"dp_shard": 8}),
}
QUICK = {"small": Case("tiny", {"dp_shard": 8}, tokens=1024, layers=4)}


def count(case: Case) -> tuple[Counter[Kernel], set[Kernel]]:
    """Return the kernels of a step of one rank, and those of a micro-batch that no layer has."""
    forest = case.spec(1).forest()
    partial, full = block_kinds(padded_ends(forest.subtree_end))
    pairs = int((partial | full).sum()) * BLOCK**2
    one, two = (Kernels(pairs // case.layout.cp) for _ in range(2))
    for layers, kernels in ((1, one), (2, two)):
        measure(case.spec(layers), case.layout, recorder=kernels)
    layers = case.spec().config.num_hidden_layers
    found: Counter[Kernel] = Counter()
    for kernel in {*one.kernels, *two.kernels}:
        growth = two.kernels[kernel] - one.kernels[kernel]
        times = 1 if kernel.phase == "update" else case.micro_batches
        found[kernel] = (one.kernels[kernel] + (layers - 1) * growth) * times
    fixed = {kernel for kernel in found if one.kernels[kernel] == two.kernels[kernel]}
    return found, fixed


def seconds(kernel: Kernel, usual: dict[str, float] | None = None) -> float:
    """Return how long a kernel takes on the device, its launch apart."""
    share = usual or dict.fromkeys(USUAL, 1.0)
    if kernel.ranks:
        passes = 2 if "reduce" in kernel.name and "scatter" not in kernel.name else 1
        return passes * kernel.bytes * (kernel.ranks - 1) / kernel.ranks / (LINK * share["exchange"])
    kind = "attention" if kernel.name.startswith("flex") else "products"
    peak = (FLOAT32_PEAK if kernel.dtype == "float32" else PEAK) * share[kind]
    return max(kernel.flops / peak, kernel.bytes / (MEMORY * share["memory"]))


def item(kernel: Kernel) -> str:
    """Return what a kernel's time is called in the table."""
    part = {"clipping": "optimizer", "dispatch": "experts", "router": "experts", "MLP": "activation"}.get(
        kernel.part, kernel.part
    )
    if kernel.phase == "recompute" and kernel.flops:
        return "recomputed products and attention"
    if kernel.flops and kernel.name.startswith("flex"):
        return "attention"
    if kernel.flops:
        return "products of the head" if kernel.part == "head" else "products of layers"
    if kernel.part in ("norms", "rotary", "activation", "residuals", "projections", "attention", "other"):
        part = "copies of activations" if part in ("projections", "attention", "other") else part
    return {
        "head": "logits and head's gradient, in memory", "FSDP": "copies and casts of FSDP",
        "activation": "gated activation", "experts": "rows of experts",
    }.get(part, part)  # fmt: skip


def shares(
    kernels: Counter[Kernel], fixed: set[Kernel], usual: dict[str, float] | None = None
) -> dict[str, float]:
    """Return the seconds of a step by item; FSDP exchanges a layer while another one computes."""
    found: defaultdict[str, float] = defaultdict(float)
    beside = computing = 0.0
    for kernel, times in kernels.items():
        taken = seconds(kernel, usual)
        if not kernel.ranks:
            found[item(kernel)] += times * taken
            found["launches of small kernels"] += times * max(0.0, LAUNCH - taken)
            computing += times * taken * (kernel.phase != "update")
        elif kernel.part == "FSDP" and kernel not in fixed:
            beside += times * taken
        else:
            what = "embedding and head" if kernel.part == "FSDP" else kernel.part
            found[f"exchanges: {what}"] += times * taken
    found["exchanges: layers, beyond the computation"] = max(0.0, beside - computing)
    found["(hidden exchanges of layers)"] = min(beside, computing)
    return {name: value for name, value in found.items() if value}


def measure_case(name: str) -> dict[str, Any]:
    """Return the figures of a case, for a step of one rank."""
    case = (CASES | QUICK)[name]
    kernels, fixed = count(case)
    spec, layout = case.spec(), case.layout
    forest, data = spec.forest(), TRAJECTORIES * CONTEXT / case.tokens
    flops = ModelShape.of(spec.config).step_flops(
        forest.tokens, forest.trainable_tokens, attention_pairs(forest)
    ) * max(data, layout.data) / layout.world  # fmt: skip
    exchanged: Counter[str] = Counter()
    for kernel, times in kernels.items():
        if kernel.ranks:
            exchanged[f"{kernel.name.replace('_base', '')} {kernel.dtype} {kernel.ranks}"] += (
                times * kernel.bytes
            )
    result: dict[str, Any] = {
        "name": name, "case": asdict(case), "layers": spec.config.num_hidden_layers,
        "micro_batches": case.micro_batches, "planned_gib": planned_memory(spec, layout).peak / GIB,
        "mfu_flops": flops, "flops": sum(kernel.flops * times for kernel, times in kernels.items()),
        "bytes": sum(kernel.bytes * times for kernel, times in kernels.items() if not kernel.ranks),
        "kernels": sum(kernels.values()), "exchanged": dict(exchanged),
        "longest": sorted(
            ([times * max(seconds(kernel), LAUNCH), times, *kernel]
             for kernel, times in kernels.items() if kernel.phase != "update"),
            reverse=True,
        )[:100],
    }  # fmt: skip
    for kind, usual in (("bound", None), ("usual", USUAL)):
        items = shares(kernels, fixed, usual)
        total = sum(value for part, value in items.items() if not part.startswith("("))
        result[kind] = {"seconds": total, "mfu": flops / total / PEAK, "items": items}
    return result


def show(found: dict[str, Any], longest: int) -> None:
    """Print a case."""
    case, bound, usual = found["case"], found["bound"], found["usual"]
    print(
        f"\n{found['name']}: {found['layers']} layers, {found['micro_batches']} micro-batches of"
        f" {case['tokens']}, {case['checkpointing']}, planned {found['planned_gib']:.1f} GiB\n"
        f"  {found['kernels']:,} kernels, {found['flops'] / 1e15:.2f} PFLOP, of them"
        f" {found['mfu_flops'] / 1e15:.2f} of the model, {found['bytes'] / 1e12:.2f} TB moved"
    )
    for name, size in sorted(found["exchanged"].items(), key=lambda each: -each[1])[:6]:
        print(f"  exchanged: {size / 1e9:8.2f} GB {name}")
    for kind in ("bound", "usual"):
        print(f"  {kind}: {found[kind]['seconds']:.2f} s, MFU {found[kind]['mfu']:.1%}")
    for part, value in sorted(bound["items"].items(), key=lambda each: -each[1]):
        other = usual["items"].get(part, 0.0)
        print(f"    {value / bound['seconds']:6.1%} {other / usual['seconds']:6.1%}  {part}")
    for taken, times, *kernel in found["longest"][:longest]:
        print(f"    {taken * 1e3:9.2f} ms {times:>8} × {Kernel(*kernel)}")


def main() -> int:
    """Run each case in a process that preloads the device guard, and print its figures."""
    parser = bench_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="run only these cases")
    parser.add_argument("--kernels", type=int, default=0, help="longest kernels to print")
    parser.add_argument("--json", type=Path, help="file of all figures")
    parser.add_argument("--child", help="run one case in this process")
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure_case(arguments.child)))
        return 0
    every = []
    with tempfile.TemporaryDirectory() as folder:
        guard = compile_guard(Path(folder))
        for name in QUICK if arguments.quick else arguments.only:
            ended = subprocess.run(
                [sys.executable, __file__, "--child", name], env=os.environ | {"LD_PRELOAD": str(guard)},
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            every.append(json.loads(ended.stdout.splitlines()[-1]))
            show(every[-1], arguments.kernels)
    if arguments.json:
        arguments.json.write_text(json.dumps(every, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
