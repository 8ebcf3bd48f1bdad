"""Compare the seconds to a reward of the quickstart and of TRL's GRPOTrainer: same model, tasks and cores.

    python scripts/bench/time_to_reward.py [--quick] [--seeds 0] [--steps 12] [--trl_setting best] [--plot F]

Both train SmolLM2-135M-Instruct on ``assets/tasks/calculator_train.jsonl`` with groups of eight, one after
the other, on the same two cores. TRL is installed from PyPI into a venv of its own, ``.agentrl/venvs/trl``;
``time_to_reward_trl.py`` runs there and has its settings. ``--trl_setting best`` first runs each of them on
the first seed, until it has the reward 0.6 or is slower than the best one so far.

Seconds count from the start of the command, so that they include loading the model, the database and the
engine. CPU seconds are those of all processes of a system; they depend less on other work on the machine. A
reward is reached at the end of the first step whose sampled trajectories have it as their mean. Exits with 1
if the quickstart needs more than 0.4 of the seconds of TRL to the reward 0.6.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import bench_parser
from process_meter import Meter
from rich.console import Console
from rich.table import Table
from time_to_reward_trl import SETTINGS

from agentrl.config.schema import RunConfig
from agentrl.local.launch import demo_model
from agentrl.local.mongod import EmbeddedMongo
from agentrl.store.client import open_existing

ROOT = Path(__file__).parents[2]
TRL_CHILD = Path(__file__).with_name("time_to_reward_trl.py")
TRL_VENV = Path(".agentrl/venvs/trl")
TRL_PACKAGES = ("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0", "peft==0.21.2", "accelerate==1.15.0")
INSTALL_SECONDS = 1800.0
SEARCH_SECONDS = 900.0
"""Most seconds of one run of TRL."""
LEVELS = (0.6, 0.9)
TARGET = 0.4
AGENTRL, TRL = "AgentRL", "TRL"


@dataclass(frozen=True)
class Step:
    """One optimizer step: its reward, and what had passed at its end."""

    step: int
    reward: float
    seconds: float
    cpu_seconds: float


@dataclass
class Run:
    """One system on one seed."""

    system: str
    seed: int
    steps: list[Step] = field(default_factory=list)
    peak_gb: dict[str, float] = field(default_factory=dict)
    """Largest resident memory of one process of each kind."""
    load: tuple[float, float] = (0.0, 0.0)
    """Load average at the start and at the end."""

    def reached(self, level: float) -> Step | None:
        """Return the first step whose reward is at least ``level``."""
        return next((step for step in self.steps if step.reward >= level), None)


def run_agentrl(seed: int, steps: int, environment: Mapping[str, str], *flags: str) -> Run:
    """Run the quickstart in an empty folder, with more ``flags``; read its steps from its database."""
    with tempfile.TemporaryDirectory(prefix="time-to-reward-") as scratch:
        folder = Path(scratch)
        (folder / "assets").symlink_to(ROOT / "assets")
        (folder / ".agentrl").mkdir()
        (ROOT / ".agentrl/models").mkdir(parents=True, exist_ok=True)
        (folder / ".agentrl/models").symlink_to(ROOT / ".agentrl/models")
        command = [
            sys.executable, "-m", "agentrl", "quickstart",
            *("--steps", str(steps), "--seed", str(seed), "--minutes", "30", "--no_evaluate", *flags),
        ]  # fmt: skip
        run = Run(AGENTRL, seed)
        began, meter = _run(command, run, folder, environment, scratch)
        mongo = EmbeddedMongo(folder / ".agentrl/mongo")
        mongo.up()
        try:
            name = "quickstart-tiny" if "--tiny" in flags else "quickstart"
            rows = asyncio.run(_committed(RunConfig(run_name=name, mongo_dir=str(folder / ".agentrl/mongo"))))
        finally:
            mongo.down()
    run.steps = [Step(step, reward, at - began, meter.cpu_at(at)) for step, reward, at in rows]
    return run


async def _committed(run: RunConfig) -> list[tuple[int, float, float]]:
    async with await open_existing(run) as store:
        steps = await store.steps.find()
    return [
        (step.step, step.metrics["reward"], step.committed_at.timestamp())
        for step in steps
        if "reward" in step.metrics and step.committed_at is not None
    ]


@dataclass(frozen=True)
class Trl:
    """How TRL runs: the Python of its venv, the model, the most steps, and the environment."""

    python: Path
    model: Path
    steps: int
    environment: Mapping[str, str]

    def best_setting(self, seed: int, level: float) -> str:
        """Return the setting that reaches ``level`` first; print what each one needed."""
        best, fewest = "", SEARCH_SECONDS
        for setting in SETTINGS:
            run = self.run(seed, setting, stop_at=level, seconds=fewest)
            print(f"time_to_reward: TRL {setting}: {curve(run)}", flush=True)
            found = run.reached(level)
            if found is not None and found.seconds < fewest:
                best, fewest = setting, found.seconds
        if not best:
            raise SystemExit(f"time_to_reward: error: no setting of TRL reached the reward {level}")
        return best

    def run(self, seed: int, setting: str, *, stop_at: float, seconds: float = SEARCH_SECONDS) -> Run:
        """Run TRL until the reward ``stop_at`` or the first step after ``seconds``; return its steps."""
        with tempfile.TemporaryDirectory(prefix="time-to-reward-") as scratch:
            out = Path(scratch) / "steps.jsonl"
            command = [
                str(self.python), str(TRL_CHILD), "--model", str(self.model.resolve()), "--out", str(out),
                *("--setting", setting, "--steps", str(self.steps), "--seed", str(seed)),
                *("--stop_at", str(stop_at), "--seconds", str(seconds)),
            ]  # fmt: skip
            run = Run(TRL, seed)
            extra = {"PYTHONPATH": str(ROOT / "src"), "TRL_EXPERIMENTAL_SILENCE": "1"}
            began, meter = _run(command, run, ROOT, {**self.environment, **extra}, scratch)
            lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        run.steps = [
            Step(line["step"], line["reward"], line["at"] - began, meter.cpu_at(line["at"])) for line in lines
        ]
        return run


def _run(
    command: Sequence[str], run: Run, folder: Path, environment: Mapping[str, str], scratch: str
) -> tuple[float, Meter]:
    before, began = os.getloadavg()[0], time.time()
    process = subprocess.Popen(command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL)
    meter = Meter(process.pid, scratch)
    meter.start()
    try:
        code = process.wait()
    finally:
        process.terminate()
        process.wait(60)
    meter.join()
    if code != 0:
        raise SystemExit(f"time_to_reward: error: {run.system} ended with exit code {code}")
    run.peak_gb, run.load = meter.peak_gb, (before, os.getloadavg()[0])
    return began, meter


def install_trl(venv: Path) -> None:
    """Create the venv with TRL, unless it is there."""
    stamp = venv / ".installed"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == " ".join(TRL_PACKAGES):
        return
    print(f"time_to_reward: installing TRL into {venv}, once", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=INSTALL_SECONDS)
    install = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", *TRL_PACKAGES]
    subprocess.run(install, check=True, timeout=INSTALL_SECONDS)
    stamp.write_text(" ".join(TRL_PACKAGES), encoding="utf-8")


def curve(run: Run) -> str:
    """Return the seconds and the reward of each step as text."""
    return "  ".join(f"{step.seconds:.0f} s {step.reward:.2f}" for step in run.steps)


def print_runs(runs: Sequence[Run], console: Console) -> None:
    """Print both curves, and what each run needed to each level."""
    for run in runs:
        console.print(f"{run.system}, seed {run.seed}: {curve(run)}", highlight=False, soft_wrap=True)
    table = Table("system", "seed", "steps")
    for level in LEVELS:
        table.add_column(f"s to {level}", justify="right")
        table.add_column(f"CPU s to {level}", justify="right")
    table.add_column("peak GB", justify="right")
    table.add_column("load", justify="right")
    for run in runs:
        cells = []
        for level in LEVELS:
            found = run.reached(level)
            cells += ["–", "–"] if found is None else [f"{found.seconds:.0f}", f"{found.cpu_seconds:.0f}"]
        peaks = ", ".join(f"{kind} {peak:.1f}" for kind, peak in sorted(run.peak_gb.items()) if peak > 1)
        load = f"{run.load[0]:.1f}–{run.load[1]:.1f}"
        table.add_row(run.system, str(run.seed), str(len(run.steps)), *cells, peaks, load)
    console.print(table)


def ratios(runs: Sequence[Run], level: float) -> dict[str, float]:
    """Return AgentRL's mean seconds and CPU seconds to ``level`` over TRL's; empty if a run missed it."""
    reached = {
        system: [run.reached(level) for run in runs if run.system == system] for system in (AGENTRL, TRL)
    }
    if not all(reached.values()) or None in [*reached[AGENTRL], *reached[TRL]]:
        return {}
    found = {}
    for name in ("seconds", "cpu_seconds"):
        means = {
            system: sum(getattr(step, name) for step in steps) / len(steps)
            for system, steps in reached.items()
        }
        found[name] = means[AGENTRL] / means[TRL]
    return found


def plot(runs: Sequence[Run], out: Path) -> None:
    """Draw reward over seconds."""
    from agentrl.observe.plotting import COLORS, finish, new_figure, save_figure

    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    for run in runs:
        color = COLORS[0] if run.system == AGENTRL else COLORS[1]
        axes.plot(
            [step.seconds for step in run.steps], [step.reward for step in run.steps],
            color=color, marker="o", markersize=3, label=f"{run.system}, seed {run.seed}",
        )  # fmt: skip
    axes.set_xlabel("seconds since the start of the command")
    axes.set_ylabel("mean score of sampled trajectories")
    axes.set_ylim(-0.03, 1.03)
    finish(axes)
    save_figure(figure, out, "--plot")


def main() -> int:
    """Run what was asked for, print the result and return 0 if the target is met."""
    parser = bench_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=12, help="steps of the quickstart")
    parser.add_argument("--trl_steps", type=int, default=30, help="most steps of TRL; it ends at reward 0.9")
    parser.add_argument(
        "--trl_setting",
        default="best",
        choices=("best", *SETTINGS),
        help="settings of TRL; best: try them all",
    )
    parser.add_argument("--trl_venv", type=Path, default=TRL_VENV)
    parser.add_argument("--cores", type=int, default=2, help="cores that each system runs on")
    parser.add_argument("--only", choices=("agentrl", "trl"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.quick:
        run = run_agentrl(0, 1, {**os.environ, "HF_HUB_OFFLINE": "1"}, "--tiny")
        print_runs([run], Console(width=160))
        return 0 if len(run.steps) == 1 else 1
    model = demo_model()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    common = {**os.environ, "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}
    runs: list[Run] = []
    threads = {**common, "OMP_NUM_THREADS": str(given.cores)}
    trl = Trl(given.trl_venv / "bin/python", model, given.trl_steps, threads)
    setting = given.trl_setting
    if given.only != "agentrl":
        install_trl(given.trl_venv)
        if setting == "best":
            setting = trl.best_setting(given.seeds[0], LEVELS[0])
    for seed in given.seeds:
        if given.only != "trl":
            runs.append(run_agentrl(seed, given.steps, common))
        if given.only != "agentrl":
            runs.append(trl.run(seed, setting, stop_at=LEVELS[-1]))
    print_runs(runs, Console(width=160))
    return _conclude(runs, given.plot, given.json)


def _conclude(runs: Sequence[Run], out: Path | None, report: Path | None) -> int:
    found: dict[str, Any] = {str(level): ratios(runs, level) for level in LEVELS}
    if out is not None:
        plot(runs, out)
    if report is not None:
        content = {"runs": [asdict(run) for run in runs], "ratios": found}
        report.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if len({run.system for run in runs}) < 2:
        return 0
    for level, values in found.items():
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in values.items())
        print(f"AgentRL / TRL to reward {level}: {shown or 'not reached by all'}")
    ratio = found[str(LEVELS[0])].get("seconds")
    print(f"target: at most {TARGET} of TRL's seconds to {LEVELS[0]}")
    return 0 if ratio is not None and ratio <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
