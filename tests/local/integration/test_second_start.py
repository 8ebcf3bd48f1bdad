"""A start that cannot work starts nothing: a run that is being trained, other settings, no model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
from tiny_policy import write_tiny_policy

from agentrl.base.folder_owner import Owner, claim
from agentrl.base.processes import Ending, identify
from agentrl.cli.main import main
from agentrl.config.schema import RunConfig
from agentrl.documents.document import now
from agentrl.documents.run import Doing
from agentrl.documents.status import Work
from agentrl.documents.training import TrainStep
from agentrl.local import launch
from agentrl.local.launch import RunPlan, trainer_ending
from agentrl.observe import trackers
from agentrl.store.client import Store, open_store, run_exists

pytestmark = pytest.mark.integration

T = TypeVar("T")


def in_run(run: RunConfig, work: Callable[[Store], Awaitable[T]]) -> T:
    """Open the run, creating it, and return the result of ``work``."""

    async def opened() -> T:
        async with await open_store(run) as store:
            return await work(store)

    return asyncio.run(opened())


@pytest.fixture
def flags(run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("ROLES", "SAMPLERS", "ENGINE", "ACCELERATE_CONFIG", "MCP_SERVERS_FILE", "MCP_MANAGER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODEL_PATH", str(write_tiny_policy(tmp_path / "model")))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": 1, "query": "?", "answer": "1", "scorer": "exact"}))
    return [
        "--run_name", run_config.run_name, "--db_connection_string", str(run_config.db_connection_string),
        "--log_dir", run_config.log_dir, "--output_dir", str(run_config.output_dir),
        "--train_file", str(tasks),
    ]  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunPlan]:
    """The plans that the launcher would have run."""
    plans: list[RunPlan] = []

    def run(plan: RunPlan) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(launch, "run_processes", run)
    return plans


def test_a_run_with_a_live_trainer_is_not_started_again(
    flags: list[str], started: list[RunPlan], run_config: RunConfig,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip

    async def train(store: Store) -> None:
        own = identify(os.getpid())
        await store.trainer_lease.acquire("trainer-7", socket.gethostname(), os.getpid(), 60.0, own)

    in_run(run_config, train)
    assert main(["launch", "train", *flags]) == 1
    printed = capsys.readouterr().err
    assert f"run '{run_config.run_name}' is running already; nothing is started" in printed
    for words in ("trainer-7", "ROLES=sample", f"kill {os.getpid()}", "agentrl status"):
        assert words in printed
    assert started == []
    monkeypatch.setenv("ROLES", "sample")
    assert main(["launch", "train", *flags]) == 0
    assert started[0].samplers == 2
    monkeypatch.delenv("ROLES")
    in_run(run_config, lambda store: store.trainer_lease.release(1))
    assert main(["launch", "train", *flags]) == 0
    assert len(started) == 2


def test_the_end_of_a_trainer_follows_its_measured_steps_and_checkpoints(
    flags: list[str], started: list[RunPlan], run_config: RunConfig
) -> None:
    assert main(["launch", "train", *flags]) == 0
    assert started[0].run is not None
    assert started[0].run.run_name == run_config.run_name

    def ending() -> Ending | None:
        return asyncio.run(trainer_ending(run_config))

    async def begin(store: Store) -> None:
        await store.trainer_lease.acquire("t", socket.gethostname(), os.getpid(), 60.0)

    async def does(store: Store, work: Work) -> None:
        await store.trainer_lease.renew(1, 60.0, Doing(work=work))

    async def train(store: Store, number: int, ago: float = 0.0, **seconds: float) -> None:
        at = now() - timedelta(seconds=ago)
        step = TrainStep(id=f"1/{number}", step=number, policy_version=0, data=(), owner="t", planned_at=at)
        await store.steps.plan(step)
        if seconds:
            await store.steps.commit(
                step.id, {f"seconds_{name}": value for name, value in seconds.items()}, ()
            )

    assert ending() is None, "there is no run"
    elsewhere = replace(run_config, db_connection_string="mongodb://127.0.0.1:9", db_timeout_seconds=0.1)
    assert asyncio.run(trainer_ending(elsewhere)) == Ending(what="the trainer has saved its step")
    in_run(run_config, begin)
    assert ending() is None, "it loads the model"
    in_run(run_config, lambda store: does(store, Work.TRAINING))
    assert ending() == Ending(what="step 1 is trained and saved")
    step = {"data": 500.0, "forward_backward": 40.0, "optimizer": 1.0}
    in_run(run_config, lambda store: train(store, 1, **step, publish_background=2.0))
    in_run(run_config, lambda store: does(store, Work.WAITING))
    assert ending() == Ending(what="step 1 is saved", seconds=8.0, longest=49.0), "a checkpoint is larger"
    in_run(run_config, lambda store: train(store, 2, forward_backward=20.0, save_background=30.0))
    assert ending() == Ending(what="step 2 is saved", seconds=32.0, longest=73.0)
    in_run(run_config, lambda store: train(store, 3, ago=11.0))
    found = ending()
    assert found is not None
    assert (found.what, found.longest) == ("step 3 is trained and saved", 73.0)
    assert 32.0 < (found.seconds or 0.0) < 62.5
    in_run(run_config, lambda store: store.trainer_lease.release(1))
    assert ending() is None, "it has ended"


def test_other_settings_than_those_of_the_run_start_nothing(
    flags: list[str], started: list[RunPlan], run_config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    async def begin(store: Store) -> None:
        await store.settings.begin("tasks", {"num_generations": 4}, "sample")
        await store.settings.begin("loss", {"loss_calculater": "GRPO"}, "train")

    in_run(run_config, begin)
    assert main(["launch", "train", *flags, "--num_generations", "2"]) == 2
    assert "--num_generations is 2, and the run has 4" in capsys.readouterr().err
    words = [*flags, "--num_generations", "4", "--loss_calculater", "GSPO"]
    assert main(["launch", "train", *words]) == 2
    assert "--loss_calculater is 'GSPO', and the run has 'GRPO'" in capsys.readouterr().err
    assert started == []
    assert list(in_run(run_config, lambda store: store.settings.all())) == ["loss", "tasks"]


def without_weights(tmp_path: Path) -> Path:
    """Return a copy of the model's folder that has lost its weights."""
    folder = tmp_path / "empty"
    shutil.copytree(tmp_path / "model", folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return folder


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (["launch", "train"], ["--model_name_or_path", "/nowhere"], "/nowhere is not a folder"),
        (["launch", "train"], ["--loss_calculater", "GPRO"], "did you mean"),
        (["sample"], ["--model_name_or_path", "/nowhere"], "/nowhere is not a folder"),
        (["sample"], ["--train_file", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["train"], ["--model_name_or_path", "/nowhere"], "/nowhere is not a folder"),
        (["serve"], ["--model_name_or_path", "/nowhere"], "/nowhere is not a folder"),
        (["gateway"], ["--model_name_or_path", "/nowhere"], "/nowhere is not a folder"),
        (["launch", "train"], ["--engine", "sglang"], "sglang is not installed"),
        (["launch", "train"], ["--report_to", "wandb"], "pip install no_such_library"),
        (["launch", "train"], ["--tools", "nowhere:tool"], "'nowhere:tool' cannot be imported"),
        (["launch", "train"], ["--model_name_or_path", "EMPTY"], "has no weights"),
        (["sample"], ["--tools", "nowhere:tool"], "'nowhere:tool' cannot be imported"),
        (["sample"], ["--mcp_servers_file", "/nowhere.yml"], "/nowhere.yml"),
        (["sample"], ["--chat_template", "/nowhere.jinja"], "/nowhere.jinja"),
        (["train"], ["--report_to", "wandb"], "pip install no_such_library"),
        (["train"], ["--model_name_or_path", "EMPTY"], "has no weights"),
        (["launch", "train"], ["--resume_from_checkpoint", "/nowhere"], "/nowhere is not a checkpoint"),
        (["train"], ["--resume_from_checkpoint", "/nowhere"], "/nowhere is not a checkpoint"),
        (["train"], ["--optim_args", "beta3=1"], "beta3"),
        (["train"], ["--freeze", "nothing"], "finds none of the model's"),
        (["train"], ["--lr_scheduler_kwargs", "{x", "--max_steps", "3"], "--lr_scheduler_kwargs is '{x'"),
        (["train"], ["--kl_coef", "0.1", "--reference_model", "/nowhere"], "/nowhere is not a folder"),
        (["train"], ["--output_dir", "TAKEN_FOLDER"], "belongs to run 'other'"),
        (
            ["train"],
            ["--lora_rank", "2", "--lora_target_modules", "nothing"],
            "matches no layer of the model",
        ),
        (["train"], ["--activation_offload", "true"], "only what full saves is moved"),
        (["train"], ["--published_versions_kept", "9" * 12], "free, and the run keeps"),
        (
            ["serve"],
            ["--engine_url", "http://127.0.0.1:9", "--engine_start_seconds", "1"],
            "no engine is ready",
        ),
        (["serve"], ["--engine", "sglang"], "sglang is not installed"),
        (["serve"], ["--model_name_or_path", "EMPTY"], "has no weights"),
        (["gateway"], ["--chat_template", "/nowhere.jinja"], "/nowhere.jinja"),
        (["gateway"], ["--gateway_host", "0.0.0.0", "--gateway_train", "feedback"], "--gateway_key_env"),
        (["gateway"], ["--gateway_port", "TAKEN"], "--gateway_port"),
        (["eval"], ["--eval_file", "TASKS", "--eval_model", "/nowhere"], "/nowhere, which is not a folder"),
        (["eval"], ["--eval_file", "TASKS", "--eval_version", "3"], "there is no run"),
        (["eval"], ["--eval_file", "TASKS", "--eval_engine", "own", "--engine", "sglang"], "sglang is not"),
        (["eval"], ["--eval_file", "TASKS", "--tools", "nowhere:tool"], "'nowhere:tool' cannot be imported"),
    ],
)
def test_a_failed_start_leaves_no_run(
    flags: list[str], started: list[RunPlan], run_config: RunConfig, command: list[str],
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("AGENTRL_SGLANG_VENV", "/nowhere")
    monkeypatch.setitem(trackers._LIBRARIES, "wandb", "no_such_library")
    claim(tmp_path / "other", Owner(run="other", id="1", server="s"), "--output_dir")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        named = {
            "EMPTY": str(without_weights(tmp_path)), "TASKS": str(tmp_path / "tasks.jsonl"),
            "TAKEN": str(taken.getsockname()[1]), "TAKEN_FOLDER": str(tmp_path / "other"),
        }  # fmt: skip
        model = [] if "--model_name_or_path" in words else ["--model_name_or_path", str(tmp_path / "model")]
        code = main([*command, *flags, *model, *(named.get(word, word) for word in words)])
    assert code == (1 if message in ("there is no run", "no engine is ready") else 2)
    assert message in capsys.readouterr().err
    assert started == []
    assert not asyncio.run(run_exists(run_config))
    assert not Path(run_config.output_dir or "").joinpath("weights").exists()
