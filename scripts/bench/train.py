"""Measure a training step: prefix merging, a comparison with TRL, and the peak memory of logprobs.

    python scripts/bench/train.py [--quick] [--only NAME ...] [--models NAME ...] [--trl FOLDER] [--json FILE]

Each measurement runs in its own process (train_child.py). A ratio compares two processes of the same run.
Seconds are CPU seconds of the process, which other load disturbs less; wall-clock ratios are printed too. To
install TRL in FOLDER (default: .agentrl/trl):

    pip install --no-deps --target .agentrl/trl trl datasets pyarrow pandas xxhash \\
        dill==0.4.0 multiprocess==0.70.18

Exits with 1 if a ratio misses its target, or if gradient norms differ: then the work was not equal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Row, bench_parser, finish, run_child
from train_workload import SMOLLM, Group

CHILD = Path(__file__).with_name("train_child.py")
TIMEOUT_SECONDS = 3600.0

TURNS = {
    "tiny": Group(trajectories=8, turns=12, prompt=1536, output=32, observation=32),
    "135M": Group(trajectories=8, turns=12, prompt=1536, output=32, observation=32),
}
QUICK_TURNS = {
    "tiny": Group(trajectories=3, turns=2, prompt=64, output=8, observation=8),
    "135M": Group(trajectories=3, turns=3, prompt=128, output=16, observation=16),
}
SAME_GRADIENT = 1e-3
"""Largest relative difference of two gradient norms of the same loss on the same data, in float32."""
SAMPLE = 24
"""With ``off``, train only every ``SAMPLE``-th row on the larger model."""
UNEVEN = {
    "short outputs": Group(trajectories=8, turns=1, prompt=256, output=64, observation=1, uneven=True),
    "long outputs": Group(trajectories=8, turns=1, prompt=64, output=128, observation=1, uneven=True),
}
"""Groups for the comparison with TRL: mean outputs of a quarter of the prompt, and of twice the prompt."""


@dataclass(frozen=True)
class Bench:
    """Settings from the command line."""

    quick: bool
    threads: int
    models: dict[str, str]
    """Models by their name in the table: a shape of ``train_workload.SHAPES``, or a folder."""
    trl: Path
    raw: dict[str, Any]
    """The result of every child process, by name."""

    def child(self, name: str, **wanted: Any) -> dict[str, Any]:
        """Run one measurement in its own process."""
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        variables = {
            "OMP_NUM_THREADS": str(self.threads), "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1",
            "AGENTRL_BENCH_TRL": str(self.trl),
        }  # fmt: skip
        result: dict[str, Any] = run_child(CHILD, wanted, seconds=TIMEOUT_SECONDS, **variables)
        self.raw[name] = {"wanted": wanted, **result}
        return result


def merging(bench: Bench) -> list[Row]:
    """Compare ``group`` and ``trajectory`` with ``off`` on a group of multi-turn trajectories, per model.

    The larger model recomputes activations (``selective``), skips ``trajectory``, and trains a sample of the
    rows of ``off``, which are independent. The sample starts warm; ``group`` includes one-time costs.
    """
    rows = []
    for model, folder in bench.models.items():
        group = (QUICK_TURNS if bench.quick else TURNS)[model]
        common = {"model": folder, "group": group.plain(), "max_tokens": _budget(group)}
        if model == "135M" and not bench.quick:
            common |= {"checkpointing": "selective", "steps": 1}
            found = {
                "off": bench.child(f"merging {model} off", way="off", sample=SAMPLE, **common),
                "group": bench.child(f"merging {model} group", way="group", **common),
            }
        else:
            common["steps"] = 1 if model == "135M" else 2
            ways = ("off", "group") if bench.quick else ("off", "trajectory", "group")
            found = {way: bench.child(f"merging {model} {way}", way=way, **common) for way in ways}
        rows += _merged_rows(model, found)
    return rows


def _budget(group: Group) -> int:
    """Return the tokens per micro-batch: the same for every way, and enough for the merged group."""
    data = group.data(1000)
    return group.prompt + sum(item.tokens - group.prompt for item in data)


def _merged_rows(model: str, found: dict[str, dict[str, Any]]) -> list[Row]:
    off, group = found["off"], found["group"]
    bound = off["tokens"] / group["tokens"]
    rows = []
    is_sample = off["sampled"] < off["micro_batches"]
    sampled = f", {off['sampled']} of {off['micro_batches']} rows" if is_sample else ""
    for way in [way for way in found if way != "off"]:
        speedup = off["cpu_seconds"] / found[way]["cpu_seconds"]
        rows.append(Row(
            what=f"{model}: {way} against off, CPU seconds",
            ours=f"{found[way]['cpu_seconds']:.2f} s, {found[way]['tokens']} tokens",
            baseline=f"{off['cpu_seconds']:.2f} s, {off['tokens']} tokens{sampled}", ratio=speedup,
        ))  # fmt: skip
        if not is_sample:
            rows.append(_same_gradient(f"{model}: gradient norm, {way} : off", found[way], off))
    rows.append(_wall_clock(f"{model}: the same for group", off, group))
    speedup = off["cpu_seconds"] / group["cpu_seconds"]
    rows += [
        Row(
            what=f"{model}: share of the bound, tokens computed once", ours=f"{speedup:.2f} x",
            baseline=f"{bound:.2f} x", ratio=speedup / bound, target=0.8,
        ),
        Row(
            what=f"{model}: share of the bound in FLOPs (attention on the mask, the head)",
            ours=f"{speedup:.2f} x", baseline=f"{off['flops'] / group['flops']:.2f} x",
            ratio=speedup / (off["flops"] / group["flops"]),
        ),
        Row(
            what=f"{model}: peak memory above the model, group : off",
            ours=_mib(group["peak_bytes"]), baseline=_mib(off["peak_bytes"]),
            ratio=group["peak_bytes"] / off["peak_bytes"], more=False,
        ),
    ]  # fmt: skip
    return rows


def trl(bench: Bench) -> list[Row]:
    """Compare a step on rows of uneven lengths with TRL, which pads rows where ours packs and merges them."""
    if not (bench.trl / "trl").is_dir():
        print(f"{bench.trl} has no TRL: skipping; --help shows how to install it", file=sys.stderr)
        return []
    return [
        row
        for model, folder in bench.models.items()
        for lengths, group in UNEVEN.items()
        for row in _against_trl(bench, f"{model}, {lengths}", folder, group)
    ]


_FASTER = {
    "tiny, short outputs": (3.0, 9.0), "tiny, long outputs": (7.0, 10.0),
    "135M, short outputs": (3.0, 8.0), "135M, long outputs": (6.0, 8.0),
}  # fmt: skip
"""Targets of tokens/s ÷ TRL's, with each trajectory a row and with groups merged."""


def _against_trl(bench: Bench, name: str, model: str, group: Group) -> list[Row]:
    common = {"model": model, "group": group.plain(), "steps": 3 if model == "tiny" else 1}
    theirs = bench.child(f"trl {name}", way="trl", rows=group.trajectories, **common)
    tokens = sum(item.tokens for item in group.data(1000))
    rows = []
    for way, target in zip(("trajectory", "group"), _FASTER[name], strict=True):
        ours = bench.child(f"trl {name} {way}", way=way, max_tokens=65536, **common)
        rows += [
            Row(
                what=f"{name}: {way} against TRL, tokens/s", ours=f"{tokens / ours['cpu_seconds']:.0f}",
                baseline=f"{tokens / theirs['cpu_seconds']:.0f}",
                ratio=theirs["cpu_seconds"] / ours["cpu_seconds"], target=target,
            ),
            _wall_clock(f"{name}: the same", theirs, ours),
            Row(
                what=f"{name}: {way} against TRL, peak memory above the model",
                ours=_mib(ours["peak_bytes"]), baseline=_mib(theirs["peak_bytes"]),
                ratio=ours["peak_bytes"] / theirs["peak_bytes"], target=0.5, more=False,
            ),
            _same_gradient(f"{name}: gradient norm, {way} : TRL", ours, theirs),
        ]  # fmt: skip
    return rows


def _same_gradient(what: str, ours: dict[str, Any], baseline: dict[str, Any]) -> Row:
    """Return the row which fails the benchmark if the two did not train the same loss on the same data."""
    norms = ours["grad_norm"], baseline["grad_norm"]
    return Row(
        what=what, ours=f"{norms[0]:.6g}", baseline=f"{norms[1]:.6g}", ratio=norms[0] / norms[1],
        equal=SAME_GRADIENT,
    )  # fmt: skip


def logprobs(bench: Bench) -> list[Row]:
    """Measure the peak memory of the projection onto 151,936 entries, without inputs and head gradient.

    The baseline is the size of the hidden states (that is, of their gradient) plus one chunk.
    """
    sizes = {
        "tokens": 256 if bench.quick else 32768, "vocabulary": 151936, "hidden": 64, "chunk": 1024,
        "vocab_chunk": 8192,
    }  # fmt: skip
    found = bench.child("logprobs", way="logprobs", sizes=sizes)
    ours = found["peak_bytes"] - found["weight_gradient_bytes"]
    bound = found["hidden_bytes"] + found["chunk_bytes"]
    return [
        Row(
            what=f"logprobs of {sizes['tokens']} tokens : hidden states + one chunk", ours=_mib(ours),
            baseline=_mib(bound), ratio=ours / bound, target=1.2, more=False,
        ),
        Row(
            what="the same : all the logits", ours=_mib(ours), baseline=_mib(found["logits_bytes"]),
            ratio=ours / found["logits_bytes"], more=False,
        ),
    ]  # fmt: skip


def _wall_clock(what: str, baseline: dict[str, Any], ours: dict[str, Any]) -> Row:
    return Row(
        what=f"{what}, wall clock", ours=f"{ours['seconds']:.2f} s", baseline=f"{baseline['seconds']:.2f} s",
        ratio=baseline["seconds"] / ours["seconds"],
    )  # fmt: skip


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


MEASURES: dict[str, Callable[[Bench], list[Row]]] = {"merging": merging, "trl": trl, "logprobs": logprobs}


def main() -> int:
    """Run the benchmarks and print their table. Return 1 if a ratio misses its target."""
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="run only these benchmarks"
    )
    parser.add_argument(
        "--models", nargs="+", choices=TURNS, default=list(TURNS), help="use only these models"
    )
    parser.add_argument(
        "--trl", type=Path, default=Path(".agentrl/trl"), help="folder with TRL (default: .agentrl/trl)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads per measurement (default: 1)")
    parser.add_argument("--json", type=Path, help="write the rows and every measurement to this file too")
    arguments = parser.parse_args()
    known = {"tiny": "tiny"} | ({"135M": str(SMOLLM)} if SMOLLM.is_dir() else {})
    if "135M" not in known:
        print(f"{SMOLLM} is missing: skipping 135M; `agentrl quickstart` downloads it", file=sys.stderr)
    wanted = ["tiny"] if arguments.quick else arguments.models
    models = {name: known[name] for name in wanted if name in known}
    bench = Bench(arguments.quick, arguments.threads, models, arguments.trl, {})
    rows = [row for name in arguments.only for row in MEASURES[name](bench)]
    code = finish("A training step", rows, quick=arguments.quick)
    if arguments.json:
        content = {"rows": [row.plain() for row in rows], "measured": bench.raw}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
