"""``agentrl eval`` with a real database and engines: what it serves, stores and compares, how it stops.

Also beside a trainer, on an environment, and when its own engine dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import number_game
import psutil
import pytest
from db_command import violations
from loaded_tasks import load_tasks
from test_sampling import Setting, quick
from tiny_policy import write_tiny_policy

from agentrl.config.load import Configs, parse
from agentrl.config.schema import JsonFlags, RunConfig, TaskConfig, ToolConfig
from agentrl.documents.run import Evaluation, PolicyVersion
from agentrl.documents.status import EvaluationStatus, StepStatus
from agentrl.errors import ConfigError, EngineError, ModelError, TaskFileError
from agentrl.evaluation.evaluate import evaluate, identify
from agentrl.evaluation.policy import EvaluatedPolicy
from agentrl.evaluation.report import compare, report
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool
from agentrl.weights.folder import checksums

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.usefixtures("starts_warm")]

WAITS = re.compile(r"waiting for an engine with version 4 \(\d+ s\): no engine")

__all__ = ["quick"]

GAME = "env:number_game:NumberGame?n=4"
TASKS = [
    {"id": "sum", "query": "1+1?", "answer": "2", "scorer": "exact", "tags": ["easy"]},
    {"id": "product", "query": "2*3?", "answer": "6", "scorer": "exact", "tags": ["easy", "times"]},
    {"id": "text", "query": "Say yes.", "answer": "yes", "scorer": "f1"},
]
SHORT = ("--max_new_tokens", "6", "--max_turns", "1", "--agent_name", "single_turn", "--tools", "")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("policy") / "model")


def write(path: Path, tasks: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    write(path, TASKS)
    return path


def of_run(run: RunConfig, *more: str) -> list[str]:
    where = ("--db_connection_string", str(run.db_connection_string), "--log_dir", run.log_dir)
    return ["--run_name", run.run_name, *where, "--max_total_tokens", "8192", *more]


def of_file(file: Path, *more: str) -> list[str]:
    return ["--eval_file", str(file), "--num_generations", "2", *SHORT, *more]


def flags(run: RunConfig, file: Path, *more: str) -> Configs:
    given = of_run(run, *of_file(file, *more))
    return parse(given, command="agentrl eval", description="", shown=[], extra=[JsonFlags])


async def publish(store: Store, folder: Path, version: int, step: int) -> None:
    await store.policy_versions.publish(
        PolicyVersion(id=version, step=step, location=str(folder), files=checksums(folder), train_step=None)
    )


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(run_config: RunConfig, tmp_path: Path) -> Iterator[Start]:
    """Starts a command of ``agentrl`` on the run; its output goes to ``NAME.out`` in ``tmp_path``."""
    started: list[subprocess.Popen[bytes]] = []
    path = os.pathsep.join([str(Path(number_game.__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}

    def run(name: str, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "agentrl", name, *of_run(run_config, *more)]
        with (tmp_path / f"{name}.out").open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait(30)


async def until(condition: Callable[[], Awaitable[bool]], process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(120):
        while not await condition():
            assert process.poll() is None
            await asyncio.sleep(0.1)


async def until_it_samples(
    store: Store, process: subprocess.Popen[bytes], model: Path
) -> list[psutil.Process]:
    """Wait until ``agentrl eval`` samples; return the processes that it started on ``model``."""

    async def is_half_done() -> bool:
        return await store.database["Task"].count_documents({"slots.status": "running"}) > 0

    await until(is_half_done, process)
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if str(model) in (each.info["cmdline"] or ()) and each.pid != process.pid]


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 200)


async def stopped_evaluation(store: Store) -> Evaluation:
    """Return the evaluation of the run, which has stopped with nothing half done."""
    (stopped,) = await store.evaluations.all()
    assert (stopped.status, stopped.results) == (EvaluationStatus.STOPPED, None)
    assert (await store.evaluations.counts(stopped.id)).running == 0
    return stopped


async def test_a_wait_says_what_it_waits_for_and_ends_at_the_first_signal(
    store: Store, start: Start, file: Path, tmp_path: Path
) -> None:
    process = start("eval", *of_file(file, "--eval_engine", "shared", "--eval_version", "4"))

    async def has_spoken() -> bool:
        return WAITS.search((tmp_path / "eval.out").read_text()) is not None

    await until(has_spoken, process)
    process.send_signal(signal.SIGINT)
    assert await ended(process) == 130
    shown = (tmp_path / "eval.out").read_text()
    assert "stopped while waiting for an engine" in shown
    assert "Traceback" not in shown
    assert max(map(len, shown.splitlines())) <= 80


async def test_a_signal_while_it_samples_leaves_nothing_half_done_and_the_same_command_goes_on(
    store: Store, run_config: RunConfig, start: Start, file: Path, model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    limits = ("--max_new_tokens", "500", "--max_concurrent_samples_per_process", "4")
    more = ("--eval_model", str(model), *limits)
    process = start("eval", *of_file(file, *more))
    children = await until_it_samples(store, process, model)
    assert children
    process.send_signal(signal.SIGINT)
    assert await ended(process) == 130
    assert "Traceback" not in (tmp_path / "eval.out").read_text()
    psutil.wait_procs(children, timeout=30)
    assert not any(child.is_running() for child in children)
    stopped = await stopped_evaluation(store)
    before = await store.database["Record"].count_documents({"score": {"$ne": None}})

    configs = flags(run_config, file, *more)
    assert await evaluate(configs, as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    (finished,) = await store.evaluations.all()
    assert shown["_id"] == finished.id == stopped.id
    assert finished.status is EvaluationStatus.FINISHED
    assert shown["results"]["total"]["scored"] == 6
    assert await store.database["Record"].count_documents({"score": {"$ne": None}}) == 6 >= before
    assert await violations(store) == []

    assert await evaluate(configs) == 0  # nothing is sampled again, so no engine starts
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("pass@1", "pass@2", "avg@2", "easy", "times", "exact", "f1"))
    assert max(map(len, shown.splitlines())) <= 80


async def test_an_own_engine_that_dies_ends_the_evaluation_which_the_same_command_finishes(
    store: Store, start: Start, file: Path, model: Path, tmp_path: Path
) -> None:
    long = of_file(file, "--eval_model", str(model), "--max_new_tokens", "400")
    process = start("eval", *long)
    children = await until_it_samples(store, process, model)
    (engine,) = [child for child in children if "agentrl.local.engine" in child.cmdline()][-1:]
    engine.kill()
    assert await ended(process) == 1
    said = (tmp_path / "eval.out").read_text()
    assert "the engine of the evaluation ended with exit code" in said
    assert "the same command goes on where this one stopped" in said
    stopped = await stopped_evaluation(store)
    assert await ended(start("eval", *long)) == 0
    (finished,) = await store.evaluations.all()
    assert (finished.id, finished.status) == (stopped.id, EvaluationStatus.FINISHED)
    total = (finished.results or {})["total"]
    assert (total["scored"], total["failed"]) == (6, 0)
    assert await violations(store) == []


@pytest.mark.usefixtures("quick")
async def test_versions_are_evaluated_on_an_environment_beside_their_trainer(
    store: Store, run_config: RunConfig, start: Start, model: Path, tmp_path: Path
) -> None:
    await load_tasks(store, run_config, TaskConfig(), f"{GAME}&seed=3", split="train", num_generations=2)
    async with ToolPool(ToolConfig()) as tools:
        guesses = iter(range(10_000))
        setting = Setting(store, lambda prompt: str(next(guesses) % 9 + 1), tools=tools)
        setting.engine.version = 0
        await setting.run()
    made = await store.database["DBRecordData"].distinct("_id")
    assert len(made) >= 4
    trainer = start(
        "train", "--model_name_or_path", str(model), "--output_dir", str(run_config.output_dir),
        "--groups_per_step", "1", "--num_generations", "2", "--max_steps", "2",
        "--publish_steps", "1", "--max_staleness", "9", "--data_wait_seconds", "60",
        "--published_versions_kept", "2",
    )  # fmt: skip
    evaluation = start(
        "eval", "--eval_file", f"{GAME}&seed=4", "--eval_steps", "2", "--max_turns", "2",
        "--max_new_tokens", "4", "--prompt_reserve_tokens", "64",
    )  # fmt: skip
    assert await ended(trainer) == 0, (tmp_path / "train.out").read_text()[-3000:]
    async with asyncio.timeout(200):
        while await store.database["Evaluation"].count_documents({"status": "finished"}) < 2:
            assert evaluation.poll() is None, (tmp_path / "eval.out").read_text()[-3000:]
            await asyncio.sleep(0.2)
    evaluation.send_signal(signal.SIGINT)
    assert await ended(evaluation) == 130
    assert len(await store.steps.find(status=StepStatus.COMMITTED)) == 2
    found = await store.evaluations.all()
    assert [(item.step, item.status) for item in found] == [
        (0, EvaluationStatus.FINISHED), (2, EvaluationStatus.FINISHED),
    ]  # fmt: skip
    for item in found:
        total = (item.results or {})["total"]
        assert (total["tasks"], total["scored"], total["failed"]) == (4, 4, 0)
    versions = await store.database["DispatchedSamplingTask"].distinct("versions.version")
    assert versions == [item.version for item in found]
    assert await store.database["DBRecordData"].distinct("_id") == made
    assert await violations(store) == []


async def test_published_versions_are_followed_on_an_own_engine_and_the_best_one_is_kept(
    store: Store, run_config: RunConfig, file: Path, model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for number, step in ((0, 0), (1, 1), (2, 2)):
        folder = tmp_path / f"v{number}"
        shutil.copytree(model, folder)
        await publish(store, folder, number, step)
    configs = flags(run_config, file, "--eval_steps", "2", "--idle_exit_seconds", "0.1", "--seed", "3")
    gate = await store.database["Admission"].find_one()
    assert await evaluate(configs) == 0
    first, last = await store.evaluations.all()
    assert [(item.version, item.step, item.status) for item in (first, last)] == [
        (0, 0, EvaluationStatus.FINISHED), (2, 2, EvaluationStatus.FINISHED),
    ]  # fmt: skip
    versions = await store.database["DispatchedSamplingTask"].distinct("versions.version")
    assert sorted(versions) == [0, 2]
    assert await store.database["DBRecordData"].count_documents({}) == 0
    assert await store.database["Admission"].find_one() == gate
    assert await store.database["InferenceService"].count_documents({}) == 0
    (counted,) = await store.database["SamplerProcess"].find().to_list()
    assert (counted["gpus"], counted["ended_at"] >= counted["heartbeat"]) == (1, True)
    assert [line for line in await violations(store) if "PolicyVersion" not in line] == []

    await store.database["Evaluation"].update_one(
        {"_id": first.id}, {"$set": {"results.total.score.value": 2.0}}
    )
    assert await store.evaluations.best_versions() == {(first.tasks_digest, first.settings_digest): 0}
    assert await store.evaluations.needed_versions() == {0}
    assert any("Evaluation eval-v000000" in line for line in await violations(store))

    capsys.readouterr()
    await compare(configs, "0", last.id, as_json=False)
    shown = capsys.readouterr().out
    assert "3 in both" in shown
    assert max(map(len, shown.splitlines())) <= 80
    await compare(configs, "v0", f"{run_config.run_name}/v2", as_json=True)
    assert json.loads(capsys.readouterr().out)["score"]["effect"]["low"] <= 1
    with pytest.raises(ConfigError, match="no finished evaluation named 'v7'"):
        await compare(configs, "v7", "v0", as_json=False)
    plot = tmp_path / "plot.svg"
    await report(configs, as_json=False, as_markdown=True, plot=str(plot))
    assert capsys.readouterr().out.count("| version ") == 2
    assert plot.stat().st_size > 1000
    await report(configs, as_json=False, as_markdown=False, plot=None)
    assert "* the best version" in capsys.readouterr().out


async def test_an_edited_file_or_another_setting_is_another_evaluation(
    store: Store, run_config: RunConfig, file: Path, model: Path
) -> None:
    policy = EvaluatedPolicy(version=3, folder=str(model))

    async def name(*more: str) -> str:
        return (await identify(store, flags(run_config, file, *more), policy)).id

    first = await name()
    assert first.startswith("eval-v000003-")
    assert await name() == first
    write(file, TASKS[::-1])
    assert await name("--shuffle_tasks", "false") == first
    assert await name("--eval_label", "again") == f"{first}-again"
    assert len({first, await name("--max_turns", "2"), await name("--num_generations", "4")}) == 3
    write(file, [{**task, "answer": "7"} for task in TASKS])
    assert await name() != first


async def test_what_cannot_be_evaluated_is_named(
    store: Store, run_config: RunConfig, file: Path, model: Path, tmp_path: Path
) -> None:
    await publish(store, model, 0, 0)
    gone = tmp_path / "gone"
    shutil.copytree(model, gone)
    await publish(store, gone, 1, 1)
    shutil.rmtree(gone)
    foreign = tmp_path / "foreign"
    shutil.copytree(model, foreign)
    tokenizer = json.loads((foreign / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (foreign / "tokenizer.json").write_text(json.dumps(tokenizer))

    async def refused(*more: str) -> None:
        wait = ("--engine_wait_seconds", "0.3", "--engine_timeout_seconds", "0.2")
        await evaluate(flags(run_config, file, *wait, *more))

    for more, error, reason in [
        (("--eval_version", "9"), ModelError, "has no policy version 9"),
        (("--eval_version", "1"), ModelError, "are not on this machine"),
        (("--eval_engine", "shared"), EngineError, r"no live engine serves any policy version after 0\.3 s"),
        (("--eval_model", str(foreign)), ModelError, "has another tokenizer"),
        (("--eval_model", str(tmp_path)), ModelError, r"has no config\.json"),
        (("--eval_model", str(tmp_path / "none")), ModelError, "not a folder"),
    ]:
        with pytest.raises(error, match=reason):
            await refused(*more)
    pruned: dict[str, Any] = {"$currentDate": {"pruned_at": True}}
    await store.database["PolicyVersion"].update_one({"_id": 1}, pruned)
    with pytest.raises(ModelError, match="were deleted"):
        await refused("--eval_version", "1")
    write(file, [])
    with pytest.raises(TaskFileError, match="holds no tasks"):
        await refused("--eval_version", "0")
    assert await store.database["Record"].count_documents({}) == 0
    with pytest.raises(ConfigError, match="two policies"):
        flags(run_config, file, "--eval_version", "0", "--eval_model", "x")
    with pytest.raises(ConfigError, match="serve only the newest"):
        flags(run_config, file, "--eval_steps", "2", "--eval_engine", "shared")


async def test_the_trainer_keeps_what_is_being_evaluated(
    store: Store, run_config: RunConfig, file: Path, model: Path
) -> None:
    policy = EvaluatedPolicy(version=5, step=5, folder=str(model))
    evaluation = await identify(store, flags(run_config, file), policy)
    await store.evaluations.begin(replace(evaluation, status=EvaluationStatus.RUNNING))
    assert await store.evaluations.needed_versions() == {5}
    await store.evaluations.end(evaluation.id, None)
    assert await store.evaluations.needed_versions() == set()
