"""The files for Slurm and SkyPilot: accelerate and AgentRL know their flags; what Slurm would run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from agentrl.columns import pool
from agentrl.config.load import parse
from agentrl.config.schema import ClaimConfig, EngineConfig, RunConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
STUBS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "scontrol $*"; fi',
    "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit; done',
    "venv/bin/accelerate": 'echo accelerate "$@"; exit "${EXIT_CODE:-0}"',
    "venv/bin/agentrl": 'echo agentrl "$@"',
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on two nodes, with commands that print what they are given."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "uri").write_text("mongodb://user:hunter2@db/", encoding="utf-8")
    return {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path),
        "SLURM_SUBMIT_DIR": "/submitted", "SLURM_JOB_ID": "41", "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_NODELIST": "node[7-8]", "AGENTRL_VENV": str(tmp_path / "venv"), "RUN_NAME": "my_run",
        "RUN_CONFIG": "/shared/run.yml", "MONGO_URI_FILE": str(tmp_path / "uri"),
    }  # fmt: skip


def submit(name: str, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(DEPLOY / "slurm" / name), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


def test_each_node_launches_its_rank_of_one_trainer(slurm: dict[str, str]) -> None:
    done = submit("trainer.sbatch", slurm, "--chat_template_kwargs", '{"enable_thinking": false}')
    assert done.returncode == 0, done.stderr
    nodes = done.stdout.splitlines()
    assert len(nodes) == 2
    for rank, line in enumerate(nodes):
        for flag in (
            "--num_machines 2", "--num_processes 16", f"--machine_rank {rank} ", "--main_process_ip node7",
            "--main_process_port 20041", "-m agentrl.train --config /shared/run.yml --run_name my_run",
            '--chat_template_kwargs {"enable_thinking": false}',
        ):  # fmt: skip
            assert flag in line
        assert "hunter2" not in line


def test_a_job_that_fails_late_is_requeued_and_one_that_fails_early_is_not(slurm: dict[str, str]) -> None:
    early = submit("trainer.sbatch", {**slurm, "EXIT_CODE": "1"})
    assert (early.returncode, "requeue" in early.stdout) == (1, False)
    late = submit("trainer.sbatch", {**slurm, "EXIT_CODE": "1", "REQUEUE_AFTER_SECONDS": "0"})
    assert (late.returncode, "scontrol requeue 41" in late.stdout) == (1, True)


@pytest.mark.parametrize(("name", "command"), [("samplers.sbatch", "sample"), ("engines.sbatch", "serve")])
def test_an_array_job_runs_a_command_with_real_flags(name: str, command: str, slurm: dict[str, str]) -> None:
    done = submit(name, slurm, "--engine", "sglang")
    words = done.stdout.split()
    assert words[:2] == ["agentrl", command]
    words[words.index("--config") : words.index("--config") + 2] = []
    configs = parse(words[2:], command=f"agentrl {command}", description="", shown=())
    assert configs[RunConfig].run_name == "my_run"
    assert configs[EngineConfig].engine == "sglang"
    assert configs[EngineConfig].inf_tp_size == (8 if command == "serve" else 1)


def test_a_sampler_is_killed_only_after_it_had_time_to_drain_and_release() -> None:
    batch, compose, chart = (
        (DEPLOY / name).read_text(encoding="utf-8")
        for name in ("slurm/samplers.sbatch", "compose.yml", "helm/agentrl/templates/samplers.yaml")
    )
    ending = pool._CANCEL_SECONDS + 2 * pool.RELEASE_SECONDS
    needed = ClaimConfig.drain_seconds + ending
    assert needed <= 30  # the grace of Kubernetes, and Slurm's KillWait, where nobody has set them
    assert int(re.findall(r"#SBATCH --signal=B:TERM@(\d+)", batch)[0]) > needed
    assert re.findall(r"(?m)^exec .*agentrl\" sample ", batch)  # no shell stands between the signal and it
    assert int(yaml.safe_load(compose)["services"]["sampler"]["stop_grace_period"].rstrip("s")) > needed
    values = yaml.safe_load((DEPLOY / "helm/agentrl/values.yaml").read_text(encoding="utf-8"))
    assert values["samplers"]["drainSeconds"] == ClaimConfig.drain_seconds
    more = int(re.findall(r"GracePeriodSeconds: {{ add .Values.samplers.drainSeconds (\d+) }}", chart)[0])
    assert more > ending


@pytest.mark.parametrize("name", ["trainer.sbatch", "samplers.sbatch", "engines.sbatch"])
def test_what_is_missing_is_named(name: str, slurm: dict[str, str]) -> None:
    missing = submit(name, {**slurm, "MONGO_URI_FILE": "/none"})
    assert (missing.returncode, "MONGO_URI_FILE is /none" in missing.stderr) == (2, True)
    unset = {key: value for key, value in slurm.items() if key != "RUN_NAME"}
    assert "RUN_NAME" in submit(name, unset).stderr


@pytest.mark.parametrize("path", ["slurm/trainer.sbatch", "skypilot/trainer.yaml"])
def test_accelerate_knows_its_flags(path: str) -> None:
    from accelerate.commands.launch import launch_command_parser

    text = (DEPLOY / path).read_text(encoding="utf-8")
    given = text[text.index(" launch --config_file") : text.index("-m agentrl.train ")]
    assert set(re.findall(r"--[a-z_]+", given)) <= set(launch_command_parser()._option_string_actions)


@pytest.mark.parametrize("name", ["trainer", "samplers"])
def test_a_skypilot_task_takes_its_connection_string_as_a_secret(name: str) -> None:
    task = yaml.safe_load((DEPLOY / f"skypilot/{name}.yaml").read_text(encoding="utf-8"))
    assert task["secrets"] == {"MONGO_URI": None}
    assert "MONGO_URI" not in task["run"] + task["setup"]
    line = task["run"].replace("\\\n", " ").split("agentrl.train " if name == "trainer" else "sample ")[-1]
    words = [word.strip('"') for word in line.split()]
    words[words.index("--config") : words.index("--config") + 2] = []
    words[words.index("--run_name") + 1] = "my_run"
    configs = parse(words, command="agentrl sample", description="", shown=())
    assert configs[RunConfig].output == "/shared/output/$RUN_NAME"
