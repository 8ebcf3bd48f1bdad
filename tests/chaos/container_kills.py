"""Kill samplers and MongoDB with SIGKILL while 16 trajectories of Harbor tasks run in containers.

    bash scripts/chaos.sh --containers 60

A scripted model runs the solution of each task by the tool ``bash``. Samplers and database are killed in
turn; then every slot must have one score of 1, and no container, process or folder may be left.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
from rootfs_here import make_rootfs
from waiting import comes_true

from agentrl.chat.model_folder import read_chat_files
from chaos.actors import TESTS, environment
from chaos.drill_services import DrillEngine
from chaos.harness_kills import Report, count_tokens, kill_in_turn, wait_for_end
from chaos.scene import GENERATIONS, READY_SECONDS, RUN, Scene

HARBOR = TESTS.parent / "assets/examples/harbor/tasks"
_REFUSED = 2
"""Tasks of the folder that no machine runs."""
_AT_ONCE = 16
_POLL_SECONDS = 0.2
_GONE_SECONDS = 30.0
_MARK = "the-solution-has-run"
_SEEN = 60


class SolvingEngine(DrillEngine):
    """Runs the solution of the task in the first turn of a conversation, and ends in the second."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        folders = [folder for folder in HARBOR.iterdir() if (folder / "instruction.md").exists()]
        self._solutions = {
            (folder / "instruction.md").read_text().split("-->")[-1].strip()[:_SEEN]: (
                folder / "solution/solve.sh"
            ).read_text()
            for folder in folders
        }

    def say(self, prompt: str) -> str:
        """Return the message of the model."""
        if _MARK in prompt:
            return "<answer>done</answer>"
        script = next(text for seen, text in self._solutions.items() if seen in prompt)
        call = {"name": "bash", "arguments": {"command": f"TARGET=out.txt\n{script}\necho {_MARK}"}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


class ContainerScene(Scene):
    """The drills' samplers, whose tasks bring containers; they have a temporary folder of their own."""

    def __init__(self, folder: Path, generations: int) -> None:
        super().__init__(folder)
        self.generations = generations
        self.mark = f"mark-{uuid.uuid4().hex}"
        """A file in the root of each container, by which its processes are found."""

    def prepare(self) -> None:
        """Write the root file system too."""
        super().prepare()
        root = make_rootfs(self.folder / "rootfs", "mktemp")
        (root / self.mark).touch()
        self.scratch.mkdir()
        own = {
            "rootfs": root, "max_attempts": 1000, "max_prompt_tokens": 6000, "max_new_tokens": 2000,
            "num_generations": self.generations,
        }  # fmt: skip
        flags = [word for name, value in own.items() for word in (f"--{name}", str(value))]
        for name, process in self.processes.items():
            if name.startswith("sampler"):
                process.command = [*process.command, *flags]
                process.env = {**process.env, "TMPDIR": str(self.scratch)}
            if name == "engine":
                process.command = [
                    word.replace("drill_services", "container_kills") for word in process.command
                ]

    @property
    def scratch(self) -> Path:
        """The folder of the samplers' temporary files."""
        return self.folder / "scratch"

    def load_command(self) -> list[str]:
        """Return the command that loads the tasks; those that are refused are left out."""
        return [
            sys.executable, "-m", "agentrl", "tasks", "load", str(HARBOR), "--run_name", RUN,
            "--db_connection_string", self.mongo.uri, "--num_generations", str(self.generations),
            "--skip_bad_lines", "--rootfs", str(self.folder / "rootfs"),
        ]  # fmt: skip

    def left(self) -> list[str]:
        """Return the processes in containers, the launchers, and the folders of samplers that exist."""
        names = sorted(path.name for path in self.scratch.glob("agentrl-*"))
        found = [name for name in names if name != f"agentrl-{os.getuid()}"]  # of weights, which stay
        for process in psutil.process_iter(["cmdline", "status", "cwd"]):
            words = " ".join(process.info["cmdline"] or ())
            is_inside = os.path.exists(f"/proc/{process.pid}/root/{self.mark}")
            is_launcher = "sandbox import launcher" in words and process.info["cwd"] == os.getcwd()
            if (is_inside or is_launcher) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid}: {words[:80]}")
        return found


async def run_container_kills(
    folder: Path, seconds: float, *, seed: int, generations: int = GENERATIONS
) -> Report:
    """Kill for ``seconds`` while the slots are sampled; then wait for the end of all."""
    scene = ContainerScene(folder, generations)
    report = Report(slots=(len(list(HARBOR.iterdir())) - _REFUSED) * generations)
    rng, victims = random.Random(f"containers/{seed}"), ("sampler-0", "sampler-1", "mongod")
    async with scene.opened(120) as store:
        load = scene.load_command()
        await asyncio.to_thread(subprocess.run, load, check=True, timeout=120, env=environment())
        async with scene.running(store, "engine", "sampler-0", "sampler-1"):
            await comes_true(lambda: len(scene.left()) >= _AT_ONCE, READY_SECONDS, _POLL_SECONDS)
            await kill_in_turn(scene, report, victims, seconds, rng, away=(0.2, 2.0), gap=(0.5, 2.5))
            counts = await wait_for_end(store, scene, report)
            await count_tokens(store, scene, report)
        report.scored, report.attempts = counts.scored, counts.claimed
        if (counts.scored, counts.closed) != (report.slots, 0):
            report.violations.append(f"{counts.scored} slots are scored, {counts.closed} failed")
        await _check_records(store.database, report)
        code = "from agentrl.base.atomic_folder import *; scratch_folder('next').rmdir()"
        own = {**environment(), "TMPDIR": str(scene.scratch)}
        await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=True, timeout=60, env=own)
        await comes_true(lambda: not scene.left(), _GONE_SECONDS, _POLL_SECONDS)
        report.violations += [f"left: {what}" for what in scene.left()]
        report.violations += await scene.check()
    return report


async def _check_records(database: Any, report: Report) -> None:
    """Each slot has one Record with a score, which is 1, and its tests' log."""
    records = database["Record"]
    rows = [
        row async for row in records.find({"score": {"$ne": None}}, {"task": 1, "traj_id": 1, "score": 1})
    ]
    slots = {(row["task"], row["traj_id"]) for row in rows}
    if len(slots) != len(rows) or len(slots) != report.slots:
        report.violations.append(f"{len(rows)} Records have a score, of {len(slots)} slots")
    wrong = [row["_id"] for row in rows if row["score"] != 1.0]
    report.violations += [f"{record} has another score than 1" for record in wrong]
    failed = await records.count_documents(
        {"failure.kind": {"$in": ["environment", "internal", "trajectory"]}}
    )
    if failed:
        report.violations.append(f"{failed} attempts failed")


if __name__ == "__main__":
    from chaos.drill_services import serve

    _, _role, port, model_folder = sys.argv
    assert read_chat_files(model_folder)
    asyncio.run(serve(int(port), SolvingEngine(model_folder).answer))
