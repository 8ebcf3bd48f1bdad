"""Train the stored run in ``run/`` and compare every step with ``losses.json``, bit for bit.

    .venv/bin/python tests/unmoved/train_dump.py             # compare
    .venv/bin/python tests/unmoved/train_dump.py --write     # write losses.json

The run is 576 trajectories, six for each of 96 tasks, with the quickstart's calculator as their tool. Its
model, in ``model/``, is that of ``agentrl quickstart --tiny``, its matrices rounded to 49 levels a row, to be
small. (The quickstart makes its model on the spot, and another CPU makes other weights.)
``agentrl serve`` and ``agentrl sample`` sampled the run, and ``agentrl db export`` wrote it. Here it is
imported into a new database of an embedded mongod, and ``agentrl train`` makes 20 steps on it, in one process
and on one thread. Groups are trained in the order in which they were begun, which is stored.

Losses are bit-equal with the torch and on the CPU that ``losses.json`` names. Others round differently:
there, losses are within 1e-5; ``--write --losses FILE`` makes a file to be bit-equal to.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import lzma
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from pymongo import MongoClient
from safetensors.numpy import save_file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUN, MODEL, LOSSES = HERE / "run", HERE / "model", HERE / "losses.json"
WEIGHTS, SCALE = "weights.npz.xz", ".scale"
NAME = "unmoved"
SEED = 0
STEPS = 20
TOLERANCE = 1e-5
JUDGED = ("loss", "grad_norm", "reward", "pass_rate", "entropy", "lr", "trainable_tokens")
"""Metrics that may deviate by no more than that on any machine; bit-equality is of all metrics."""

TRAIN_SECONDS, COMMAND_SECONDS = 240.0, 90.0
MACHINE = ("seconds", "tokens_per_second", "mfu", "peak_memory", "flops")
"""Parts of the names of metrics that tell of the machine."""

FLAGS = (
    "--max_steps", str(STEPS), "--seed", str(SEED), "--groups_per_step", "3", "--num_generations", "6",
    "--num_train_epochs", "1", "--max_staleness", "40", "--max_prompt_tokens", "256",
    "--prompt_reserve_tokens", "32", "--max_new_tokens", "40", "--max_tokens", "320",
    "--prefix_merging", "group", "--loss_calculater", "GRPO", "--token_level_loss", "true",
    "--epsilon", "0.2", "--epsilon_higher", "0.1", "--importance_weight_cap_ratio", "4",
    "--out_of_date_decay", "0.02", "--dual_clip", "inf", "--kl_coef", "0.02", "--entropy_coef", "0.001",
    "--learning_rate", "2e-4", "--lr_scheduler_type", "cosine", "--warmup_steps", "2",
    "--weight_decay", "0.01", "--max_grad_norm", "1", "--dtype", "float32",
    "--save_steps", "1000", "--publish_steps", "1000", "--data_wait_seconds", "60",
)  # fmt: skip
"""Short micro-batches, so that a step has several; a KL, an entropy and ages, so that the loss reads all."""

Step = dict[str, Any]
"""``step``, ``data`` (SHA-256 of the ids, in order) and ``metrics``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train the run, then write the losses or print the comparison; 1 where they deviate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the losses instead of comparing them")
    parser.add_argument("--losses", type=Path, default=LOSSES, help="the file of losses (%(default)s)")
    options = parser.parse_args(argv)
    now: dict[str, Any] = {**made_here()}
    with tempfile.TemporaryDirectory(prefix="unmoved-") as scratch:
        model = make_model(Path(scratch) / "model")
        now["steps"] = train(model, Path(scratch))
    if options.write:
        options.losses.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        print(f"{options.losses}: {len(now['steps'])} steps, torch {now['torch']}, {now['cpu']}")
        return 0
    return compare(json.loads(options.losses.read_text(encoding="utf-8")), now)


def made_here() -> dict[str, str]:
    """What rounding depends on: losses are bit-equal where both are the same."""
    return {"torch": version("torch"), "cpu": _cpu_name()}


def make_model(folder: Path) -> Path:
    """Write the stored model as a Hugging Face folder; the same bytes everywhere."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    stored = np.load(io.BytesIO(lzma.decompress((MODEL / WEIGHTS).read_bytes())))
    names = [name for name in stored.files if not name.endswith(SCALE)]
    scales = {name: stored[name + SCALE] for name in names if name + SCALE in stored.files}
    weights = {name: stored[name] * scales.get(name, np.float32(1)) for name in names}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def train(model: Path, scratch: Path) -> list[Step]:
    """Import the run into a new database and train it in a process of its own; return its steps."""
    mongo = scratch / "mongo"
    database = ("--run_name", NAME, "--mongo_dir", str(mongo))
    try:
        agentrl("mongo", "up", "--mongo_dir", str(mongo))
        agentrl("db", "import", str(RUN), *database)
        agentrl(
            "train", *database, *FLAGS, "--model_name_or_path", str(model), "--output_dir",
            str(scratch / "output"), "--log_dir", str(scratch / "logs"), seconds=TRAIN_SECONDS,
        )  # fmt: skip
        uri = agentrl("mongo", "uri", "--mongo_dir", str(mongo)).strip()
        return list(read_steps(uri))
    finally:
        agentrl("mongo", "down", "--mongo_dir", str(mongo))


def agentrl(*arguments: str, seconds: float = COMMAND_SECONDS) -> str:
    """Run one ``agentrl`` command on one thread and return what it prints; RuntimeError where it fails."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", *arguments],
        cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    if done.returncode != 0:
        output = f"{done.stdout}{done.stderr}"[-6000:]
        raise RuntimeError(f"agentrl {arguments[0]} ended with exit code {done.returncode}:\n{output}")
    return done.stdout


def read_steps(uri: str) -> Iterator[Step]:
    """Yield the committed steps as the database has them; floats in hexadecimal, which loses no bit."""
    with MongoClient[dict[str, Any]](uri, serverSelectionTimeoutMS=20_000) as client:
        for document in client[NAME]["TrainStep"].find({"status": "committed"}, sort=[("step", 1)]):
            metrics = {
                name: value.hex() if isinstance(value, float) else value
                for name, value in sorted(document["metrics"].items())
                if not any(part in name for part in MACHINE)
            }
            ids = hashlib.sha256("\n".join(document["data"]).encode()).hexdigest()
            yield {"step": document["step"], "data": ids, "metrics": metrics}


def compare(before: dict[str, Any], now: dict[str, Any]) -> int:
    """Print a line a step and what deviates most; 1 where a number or the data of a step are others."""
    same_machine = all(before[name] == now[name] for name in made_here())
    print(f"before: torch {before['torch']}, {before['cpu']}")
    print(f"now:    torch {now['torch']}, {now['cpu']}")
    print(f"\nstep  {'loss before':>22}  {'loss now':>22}  {'gradient norm':>14}  {'reward':>7}  equal")
    equal, worst, wrong = 0, (0.0, ""), []
    for old, new in zip(before["steps"], now["steps"], strict=False):
        is_equal = old == new
        equal += is_equal
        told, found = old["metrics"], new["metrics"]
        loss, norm, reward = (number(found.get(name)) for name in ("loss", "grad_norm", "reward"))
        print(
            f"{old['step']:>4}  {number(told['loss']):>22.17g}  {loss:>22.17g}  {norm:>14.8f}  {reward:>7.4f}"
            f"  {'yes' if is_equal else 'NO'}"
        )
        if old["data"] != new["data"]:
            wrong.append(f"step {old['step']} trains other data")
        if told.keys() != found.keys():
            wrong.append(f"step {old['step']} reports other metrics: {sorted(told.keys() ^ found.keys())}")
        deviations = ((deviation(told[name], found.get(name)), name) for name in JUDGED)
        worst = max(worst, max((far, f"{name} of step {old['step']}") for far, name in deviations))
    if len(before["steps"]) != len(now["steps"]):
        wrong.append(f"{len(now['steps'])} steps, not {len(before['steps'])}")
    print("\n" + "".join(f"{line}\n" for line in wrong), end="")
    if equal == len(before["steps"]) and not wrong:
        print(f"bit-equal: {equal} of {len(before['steps'])}")
        return 0
    machine = "the same" if same_machine else "another"
    far = f"largest deviation {worst[0]:.3g}" + (f" ({worst[1]})" if worst[0] else "")
    print(f"bit-equal: {equal} of {len(before['steps'])}; {machine} torch and CPU; {far}")
    return 1 if wrong or worst[0] > TOLERANCE else 0


def number(value: Any) -> float:
    """Return a stored number as a float; NaN for what is none."""
    if isinstance(value, str):
        return float.fromhex(value)
    return float(value) if isinstance(value, int) else math.nan


def deviation(before: Any, now: Any) -> float:
    """Return how far two values are apart, relative where ``before`` is above 1; inf for what cannot be."""
    if before == now:
        return 0.0
    try:
        old, new = number(before), number(now)
    except ValueError:
        return math.inf
    far = abs(new - old) / max(1.0, abs(old))
    return far if math.isfinite(far) else math.inf


def _cpu_name() -> str:
    """Name the CPU; the family and model tell apart those that a virtual machine gives the same name."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if "model name" in facts:
            return f"{facts['model name']} ({facts.get('cpu family')}/{facts.get('model')})"
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
