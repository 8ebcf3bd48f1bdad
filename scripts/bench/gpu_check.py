"""Check one GPU in ten minutes: tests, training steps, an engine; write a page of figures.

    python scripts/bench/gpu_check.py [--out FILE] [--minutes N] [--only PART ...] [--model DIR]
    python scripts/bench/gpu_check.py --fake     the same program without a GPU
    python scripts/bench/gpu_check.py --quick    the smallest run of it, without a GPU

The parts run one after another in processes of their own (gpu_check_child.py), each with a time limit:

tests   the tests that are marked ``gpu``
0.6B    steps of Qwen3-0.6B with random weights: speed, MFU, peak memory beside that of ``agentrl plan``
8B      the same with as many layers of Qwen3-8B as fit
MoE     the same with as many layers of Qwen3-30B-A3B as fit
engine  ``agentrl parity`` with SGLang, a step, a publication, an update of the engine, and parity again

With ``--fake`` steps run on fake CUDA tensors, which show memory and not speed, and the engine part trains a
tiny model on the CPU, with products in bfloat16, beside the local engine. Exits with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl.base.processes import run_child, tail

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("gpu_check_child.py")
GIB = 2**30
SECONDS = {"tests": 180.0, "0.6B": 150.0, "8B": 180.0, "MoE": 180.0, "engine": 300.0}
"""The limit of each part."""
PLAN_TOLERANCE = 0.1
"""How far the planned memory may be from the measured one."""
FAKE_GPU = "NVIDIA H100 80GB HBM3"
FAKE_GIB = 79.0

Row = tuple[object, ...]


class PartError(Exception):
    """Why a part failed."""


class NotRunError(Exception):
    """Why a part did not run, which is no failure."""


@dataclass(kw_only=True)
class Check:
    """The command line, and the figures so far."""

    fake: bool
    layers: int
    engine: str
    model: str | None
    deadline: float
    scratch: Path
    machine: dict[str, Any] = field(default_factory=dict)
    steps: list[Row] = field(default_factory=list)
    parities: list[Row] = field(default_factory=list)
    updates: list[Row] = field(default_factory=list)
    limit: float = 0.0
    """When the current part has to end."""

    def run(self, name: str, command: list[str], **variables: str) -> str:
        """Run a command within the time of the current part; return its output. Raises PartError."""
        log = self.scratch / f"{name}.log"
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | variables
        if self.fake:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        seconds = self.limit - time.monotonic()
        try:
            code = run_child(command, log=log, env=environment, seconds=max(seconds, 1.0))
        except subprocess.TimeoutExpired as error:
            raise PartError(f"{name} did not end within its time ({seconds:.0f} s): {_last(log)}") from error
        if code:
            raise PartError(f"{name} ended with exit code {code}: {_last(log)}")
        return log.read_text(encoding="utf-8", errors="replace")

    def child(self, name: str, wanted: dict[str, Any], **variables: str) -> dict[str, Any]:
        """Run gpu_check_child.py, and return its figures."""
        return _json(self.run(name, [sys.executable, str(CHILD), json.dumps(wanted)], **variables))


def run_tests(check: Check) -> str:
    """Run the tests that need a GPU."""
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    found = check.run("gpu tests", command).strip().splitlines()[-1].strip("= ")
    if "passed" not in found:
        raise NotRunError(f"{found}: the tests need a GPU")
    return found


def run_step(check: Check, shape: str) -> str:
    """Train steps of ``shape``, and compare their peak memory with the plan's."""
    folder = check.scratch / shape
    wanted = {
        "way": "step", "shape": shape, "folder": str(folder), "layers": check.layers, "fake": check.fake,
    }  # fmt: skip
    variables = {"LD_PRELOAD": str(_guard(check))} if check.fake else {}
    found = check.child(f"step {shape}", wanted, **variables)
    planned = _planned(check, folder, found)
    ratio = planned / found["peak_bytes"]
    check.steps.append((
        shape, f"{found['layers']} of {found['all_layers']}", f"{found['parameters'] / 1e9:.2f} × 10⁹",
        found["tokens"], _number(found.get("seconds"), ".2f"), _number(found.get("first"), ".1f"),
        _number(found.get("tokens_per_second"), ",.0f"), _number(found.get("tflops_per_second"), ".0f"),
        "–" if found.get("mfu") is None else f"{found['mfu']:.1%}",
        f"{found['peak_bytes'] / GIB:.2f}", f"{planned / GIB:.2f}", f"{ratio:.3f}",
    ))  # fmt: skip
    if abs(ratio - 1) > PLAN_TOLERANCE:
        raise PartError(f"the planned peak memory is {ratio:.2f} × the measured one")
    return "ok, on fake tensors: memory alone" if check.fake else "ok"


def _planned(check: Check, folder: Path, found: dict[str, Any]) -> int:
    """Return the peak bytes that ``agentrl plan`` gives for the step that was measured."""
    group, context = found["group"], found["context"]
    trained = group["turns"] * group["output"] / context
    flags: dict[str, object] = {
        "model": folder, "gpus": "1xH100", "gpu_memory_gib": 1024, "context": context,
        "prompt_tokens": group["prompt"], "max_tokens": found["max_tokens"], "turns": group["turns"],
        "groups_per_step": found["micro_batches"], "num_generations": group["trajectories"],
        "trained_share": trained, "activation_checkpointing": "full", "fitting": 1,
        "gradient_reduction": found["reduction"],
    }  # fmt: skip
    command = [sys.executable, "-m", "agentrl", "plan", "--json"]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    return int(_json(check.run("agentrl plan", command))["layouts"][0]["peak_bytes"])


def run_engine(check: Check) -> str:
    """Compare a trainer with an engine, publish a step, and update the engine."""
    found = check.child("engine", {
        "way": "engine", "shape": "tiny" if check.fake else "0.6B", "kind": check.engine,
        "folder": str(check.scratch / "engine" / "model"), "given": check.model,
        "seconds": max(check.limit - time.monotonic() - 20, 1.0),
    })  # fmt: skip
    means = []
    for weights in ("before", "after"):
        for item in found[weights]:
            means.append(item["mean"] / item["limit"])
            check.parities.append((
                item["engine"], f"{weights} the update", item["executor"], item["tokens"],
                f"{item['mean']:.2e}", f"{item['max']:.2e}", f"{item['limit']:g}",
            ))  # fmt: skip
    check.updates.append((
        check.engine, f"{found['bytes'] / GIB:.3f}", f"{found['start']:.1f}", f"{found['publish']:.2f}",
        f"{found['update']:.2f}",
    ))  # fmt: skip
    if not max(means) < 1:
        raise PartError("the mean of |Δlogprob| reaches its limit")
    return "ok, a tiny model on the CPU" if check.fake else "ok"


PARTS: dict[str, Callable[[Check], str]] = {
    "tests": run_tests,
    "0.6B": lambda check: run_step(check, "0.6B"),
    "8B": lambda check: run_step(check, "8B"),
    "MoE": lambda check: run_step(check, "MoE"),
    "engine": run_engine,
}


def _guard(check: Check) -> Path:
    """Compile the device guard of fake CUDA tensors, once."""
    library = check.scratch / "noop_guard.so"
    if not library.is_file():
        torch = Path(check.machine["torch_folder"])
        source = ROOT / "tests" / "fake_gpu" / "noop_guard.cpp"
        includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
        libraries = [f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib"]
        options = ["-shared", "-fPIC", "-O1", "-std=c++20"]
        check.run("g++", ["g++", *options, *includes, str(source), *libraries, "-o", str(library)])
    return library


def _json(text: str) -> dict[str, Any]:
    """Return the last JSON object that begins a line of ``text``."""
    decoder, found = json.JSONDecoder(), None
    offset = 0
    while (begin := text.find("{", offset)) >= 0:
        offset = begin + 1
        if begin and text[begin - 1] != "\n":
            continue
        try:
            found, offset = decoder.raw_decode(text, begin)
        except ValueError:
            continue
    if found is None:
        raise PartError(f"no figures in the output: {text.strip()[-200:]}")
    return dict(found)


def _last(log: Path) -> str:
    """Return the last line of ``log`` that says something, as a cell of a table."""
    lines = [line.strip() for line in tail(log).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return ((errors or lines or ["no output"])[-1])[:300].replace("|", "\\|")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def page(check: Check, results: list[Row], began: datetime) -> str:
    """Return the figures as Markdown."""
    machine = check.machine
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    gpu = f"{machine.get('gpu', 'none')}"
    if "gpu" in machine:
        gpu += f", {machine['gpu_gib']:.0f} GiB, driver {machine['driver']}, CUDA {machine['cuda']}"
    elif check.fake:
        gpu += f"; fake CUDA tensors stand for {FAKE_GPU}"
    about: list[Row] = [
        ("date", f"{began:%Y-%m-%d %H:%M} UTC"), ("commit", commit or "–"), ("GPU", gpu),
        ("host", f"{machine['cpu']}, {machine['cores']} cores, {machine['host_gib']:.0f} GiB"),
        ("software", f"torch {machine['torch']}, Python {machine['python']}"),
        ("command", f"`{shlex.join(['python', *sys.argv])}`"),
    ]  # fmt: skip
    step_columns = (
        "shape", "layers", "parameters", "tokens a step", "s a step", "s of the first", "tokens/s", "TFLOP/s",
        "MFU", "peak GiB", "planned GiB", "planned : measured",
    )  # fmt: skip
    tables = (
        ("", ("", "value"), about),
        ("Parts", ("part", "result", "seconds"), results),
        ("Training steps", step_columns, check.steps),
        ("|Δlogprob| of trainer and engine, products in bfloat16".replace("|", "\\|"),
         ("engine", "weights", "executor", "tokens", "mean", "max", "limit of the mean"), check.parities),
        ("Publication", ("engine", "GiB", "s to start the engine", "s to publish", "s to update the engine"),
         check.updates),
    )  # fmt: skip
    blocks = ["# GPU check"]
    for title, columns, rows in tables:
        if rows:
            blocks += [f"## {title}"] * bool(title)
            lines = [columns, ("---",) * len(columns), *rows]
            blocks.append("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))
    return "\n\n".join(blocks) + "\n"


def main() -> int:
    """Run the parts, and write the page. Return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fake", action="store_true", help="run without a GPU")
    parser.add_argument("--out", type=Path, default=Path("output/gpu_check.md"), help="file of the page")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of all parts (default: 10)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run only these parts")
    parser.add_argument("--layers", type=int, default=0, help="layers of a model at most (0: all)")
    parser.add_argument(
        "--engine", choices=("local", "sglang", "vllm"), help="default: sglang; local if fake"
    )
    parser.add_argument("--model", help="model of the engine part (default: random weights)")
    parser.add_argument("--quick", action="store_true", help="--fake --layers 1 --only tests 0.6B engine")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.fake, arguments.layers, arguments.only = True, 1, ["tests", "0.6B", "engine"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the children end, and the folder is removed
    began, started = datetime.now(UTC), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agentrl-gpu-check-") as scratch:
        check = Check(
            fake=arguments.fake, layers=arguments.layers, model=arguments.model, scratch=Path(scratch),
            engine=arguments.engine or ("local" if arguments.fake else "sglang"),
            deadline=started + 60 * arguments.minutes,
        )  # fmt: skip
        check.limit = check.deadline
        check.machine = check.child("machine", {"way": "machine"})
        if not arguments.fake and "gpu" not in check.machine:
            print("gpu_check: torch finds no GPU here; --fake runs without one", file=sys.stderr)
            return 2
        results, failed = run_parts(check, arguments.only)
        text = page(check, results, began)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten to {arguments.out}")
    return int(failed)


def run_parts(check: Check, names: list[str]) -> tuple[list[Row], bool]:
    """Return a row for each part, and whether one failed."""
    results: list[Row] = []
    failed = False
    for name in (name for name in PARTS if name in names):
        print(f"gpu_check: {name} …", file=sys.stderr, flush=True)
        began = time.monotonic()
        check.limit = min(began + SECONDS[name], check.deadline)
        try:
            if began >= check.deadline:
                raise PartError("the time of the check was over")
            found = PARTS[name](check)
        except NotRunError as error:
            found = f"not run: {error}"
        except PartError as error:
            found, failed = f"**failed**: {error}", True
        results.append((name, found, f"{time.monotonic() - began:.0f}"))
        print(f"gpu_check: {name}: {found}", file=sys.stderr, flush=True)
    return results, failed


if __name__ == "__main__":
    sys.exit(main())
