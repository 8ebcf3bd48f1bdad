"""The trainer as a process on a real database: steps, versions, kill -9, resume, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked, forked
from ready_data import statuses
from safetensors.torch import load_file
from tiny_policy import write_tiny_policy
from torch import Tensor
from training_data import group
from waiting import until

from agentrl.config.schema import RunConfig
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.record import Failure, Record
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import DataStatus, RecordStatus, StepStatus, TaskStatus
from agentrl.documents.task import Task
from agentrl.documents.training import TrainStep
from agentrl.store.client import Store, open_store
from agentrl.weights.folder import verify

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]

GROUPS = ("a", "b", "c", "d", "e", "f")
TRAIN = ("-m", "agentrl.train")
FAULTS = ("-m", "trainer_faults")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *TRAIN)
ACCELERATE = (
    "-m", "accelerate.commands.launch", "--config_file",
    str(Path(__file__).parents[3] / "assets" / "fsdp2_dst.yml"),
    "--num_processes", "2", "--main_process_port", "0", *TRAIN,
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("model"))


@dataclass
class Run:
    """One run: its database, its folder, and the command that trains it."""

    name: str
    uri: str
    base: Path
    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / self.name

    def flags(self, *more: str) -> list[str]:
        return [
            "--run_name", self.name, "--db_connection_string", self.uri, "--output_dir", str(self.output),
            "--log_dir", str(self.folder / "logs"), "--model_name_or_path", str(self.base),
            "--groups_per_step", "2", "--num_generations", "2", "--max_staleness", "9",
            "--learning_rate", "1e-2", "--save_steps", "1", "--max_prompt_tokens", "1536",
            "--max_new_tokens", "512", "--verify_data", "false", *more,
        ]  # fmt: skip

    def start(self, *more: str, fault: str | None = None) -> AbstractContextManager[Forked]:
        """Train in a forked process, with a fault of ``trainer_faults``; two of them may run at once."""
        words = self.flags(*more)
        log = self.folder / f"train-{time.monotonic_ns()}.log"
        return forked(TRAIN, words, log) if fault is None else forked(FAULTS, [fault, *words], log)

    def train(self, *more: str, fault: str | None = None) -> tuple[int, str]:
        """Train to the end in a forked process."""
        with self.start(*more, fault=fault) as process:
            return process.wait(100)

    def launch(self, *more: str, program: tuple[str, ...] = TRAIN) -> tuple[int, str]:
        """Train to the end by the command that a person enters."""
        ended = subprocess.run(
            [sys.executable, *program, *self.flags(*more)], env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False,
        )  # fmt: skip
        return ended.returncode, ended.stdout

    async def open(self) -> Store:
        return await open_store(RunConfig(run_name=self.name, db_connection_string=self.uri))

    async def drop(self) -> None:
        """Delete the database."""
        async with await self.open() as store:
            await store.database.client.drop_database(self.name)

    def beside(self, name: str) -> Run:
        """Another run with a folder beside this one's."""
        return replace(self, name=f"{self.name}_{name}")

    async def fill(self, *, finished: bool = True) -> None:
        """Finalized groups with their data; unless ``finished``, one more task is still being sampled."""
        async with await self.open() as store:
            await store.tasks.load([_task(order, name) for order, name in enumerate(GROUPS)])
            if not finished:
                await store.tasks.load([_task(99, "open", TaskStatus.RUNNING)])
            data = [item.to_document() for name in GROUPS for item in group(name)]
            await store.database["DBRecordData"].insert_many(data)


def _task(order: int, name: str, status: TaskStatus = TaskStatus.COMPLETED) -> Task:
    summary = {
        "scored": 2, "failed": 0, "mean_score": 0.5, "pass_rate": 0.5, "trained": 2,
        "finalized_at": datetime(2026, 1, 1, tzinfo=UTC),
    }  # fmt: skip
    return Task(
        id=name, task_id=name, split="train", epoch=0, order=order, query="q", status=status, group=summary
    )


@pytest.fixture
async def run(mongo_uri: str, base: Path, tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(f"t{time.monotonic_ns()}", mongo_uri, base, tmp_path)
    yield run
    await run.drop()


def told(steps: list[TrainStep]) -> list[tuple[int, tuple[str, ...], float]]:
    return [(step.step, step.data, step.metrics["loss"]) for step in steps]


async def steps_of(run: Run, status: StepStatus | None = StepStatus.COMMITTED) -> list[TrainStep]:
    async with await run.open() as store:
        return await store.steps.find(status=status)


@pytest.fixture(scope="module")
def whole(
    starts_warm: None, mongo_uri: str, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """A run that the command which a person enters has trained to its end; tests only read it."""
    run = Run(f"t{time.monotonic_ns()}", mongo_uri, base, tmp_path_factory.mktemp("whole"))
    asyncio.run(run.fill())
    code, output = run.launch()
    assert code == 0, output
    yield run
    asyncio.run(run.drop())


async def test_three_steps_three_versions_a_checkpoint(whole: Run) -> None:
    async with await whole.open() as store:
        steps = await store.steps.find()
        assert [step.step for step in steps] == [1, 2, 3]
        assert [step.policy_version < step.step for step in steps] == [True] * 3
        assert (steps[0].metrics["reward"], steps[0].metrics["pass_rate"]) == (0.5, 0.5)
        versions = await store.policy_versions.all()
        assert [version.id for version in versions] == list(range(len(versions)))
        assert versions[-1].step == 3, "those in between are not all published: training does not wait"
        for version in versions:
            verify(version.location, version.files)
        counts = await statuses(store)
        assert counts[DataStatus.TRAINED] == 2 * len(GROUPS)
    assert (whole.output / "checkpoint-000003" / "model" / "config.json").is_file()


@pytest.mark.usefixtures("short_transactions")
async def test_kill_9_in_a_step_trains_nothing_twice_and_changes_no_loss(run: Run, whole: Run) -> None:
    await run.fill()
    code, output = run.train(fault="kill_in_step_2")
    assert code == -signal.SIGKILL, output
    planned = await steps_of(run, StepStatus.PLANNED)
    assert [step.step for step in planned] == [2]
    code, output = run.train()
    assert code == 0, output
    assert told(await steps_of(run)) == told(await steps_of(whole))
    async with await run.open() as store:
        documents = await store.database["DBRecordData"].find().to_list()
    assert {document["_id"] for document in documents if document["trained_count"] == 1} == {
        item.id for name in GROUPS for item in group(name)
    }


@pytest.mark.usefixtures("short_transactions")
async def test_kill_9_while_a_version_is_written_leaves_none_of_it(run: Run) -> None:
    await run.fill()
    code, output = run.train("--publish", "full", fault="kill_while_writing")
    assert code == -signal.SIGKILL, output
    async with await run.open() as store:
        newest = await store.policy_versions.latest()
        assert newest is not None
        assert newest.step == 1
        verify(newest.location, newest.files)
    code, output = run.train()
    assert code == 0, output
    async with await run.open() as store:
        versions = await store.policy_versions.published(9)
    assert versions[0].step == 3
    for version in versions:
        verify(version.location, version.files)
    assert not [*run.output.glob("**/.tmp-*")]


async def test_bad_data_are_set_aside_and_all_others_trained(run: Run) -> None:
    await run.fill()
    bad = {
        "b/0/1": {"input_ids": pack_ids([10**6] * 10)},
        "c/1/1": {"behavior_logprobs": pack_floats([float("nan")] * 4)},
        "e/0/1": {"input_ids": b"123"},
    }
    async with await run.open() as store:
        for key, fields in bad.items():
            await store.database["DBRecordData"].update_one({"_id": key}, {"$set": fields})
    code, output = run.train()
    assert code == 0, output
    async with await run.open() as store:
        documents = await store.database["DBRecordData"].find().to_list()
    status = {document["_id"]: document["status"] for document in documents}
    assert {key for key, value in status.items() if value == "quarantined"} == bad.keys()
    assert {value for key, value in status.items() if key not in bad} == {"trained"}
    assert [step.step for step in await steps_of(run)] == [1, 2, 3]


@pytest.mark.usefixtures("short_transactions")
async def test_kill_9_between_two_parts_of_a_commit_trains_all_once(run: Run) -> None:
    await run.fill()
    code, output = run.train(fault="kill_between_parts")
    assert code == -signal.SIGKILL, output
    [half] = await steps_of(run, StepStatus.COMMITTING)
    async with await run.open() as store:
        items = await store.training.fetch(half.data)
    assert [item.trained_at_steps for item in items] == [(2,), (2,), (), ()]
    code, output = run.train()
    assert code == 0, output
    steps = await steps_of(run)
    assert [(step.step, step.data == half.data) for step in steps] == [(1, False), (2, True), (3, False)]
    trained = {item: step.step for step in steps for item in step.data}
    async with await run.open() as store:
        documents = await store.database["DBRecordData"].find().to_list()
    assert {document["_id"]: document["trained_at_steps"] for document in documents} == {
        item: [number] for item, number in trained.items()
    }


@pytest.mark.timeout(240)
async def test_out_of_memory_names_the_flags_that_help_and_the_run_goes_on_with_them(run: Run) -> None:
    await run.fill()
    code, output = run.train("--max_tokens", "4096", fault="exhaust_memory")
    assert code == 1
    assert "out of memory with micro-batches of --max_tokens 4096" in output
    assert "--activation_checkpointing selective" in output
    assert "--max_tokens (to 2048" in output
    assert "Traceback" not in output
    code, output = run.train("--max_tokens", "2048", "--activation_checkpointing", "full")
    assert code == 0, output
    assert [step.step for step in await steps_of(run)] == [1, 2, 3]


async def test_sigterm_saves_and_the_same_command_goes_on(run: Run) -> None:
    await run.fill(finished=False)
    with run.start("--save_steps", "99") as process:
        await has_steps(run, 3)
        process.signal(signal.SIGTERM)
        code, output = process.wait(60)
    assert code == 0, output
    assert (run.output / "checkpoint-000003" / "state.json").is_file()
    newest = await newest_version(run)
    shutil.rmtree(newest.location)  # engines would serve older weights, for which samplers begin nothing
    code, output = run.train("--max_steps", "3")
    assert code == 0, output
    assert len(await steps_of(run)) == 3
    again = await newest_version(run)
    assert (again.id, again.step) == (newest.id + 1, 3)
    verify(again.location, again.files)


async def newest_version(run: Run) -> PolicyVersion:
    async with await run.open() as store:
        newest = await store.policy_versions.latest()
    assert newest is not None
    return newest


async def has_steps(run: Run, count: int) -> None:
    """Wait until the run has so many steps."""
    async with await run.open() as store, asyncio.timeout(90):
        while len(await store.steps.find()) < count:
            await store.wait_for_change("TrainStep", timeout=1.0)


@pytest.mark.usefixtures("short_transactions")
async def test_data_that_are_trained_twice_rest_in_between_across_a_resume(run: Run) -> None:
    twice = ("--max_trained_count", "2", "--retrained_interval", "2")
    undisturbed = run.beside("whole")
    await undisturbed.fill()
    assert undisturbed.train(*twice)[0] == 0
    expected = told(await steps_of(undisturbed))
    await undisturbed.drop()

    await run.fill()
    code, output = run.train(*twice, fault="kill_in_step_4")
    assert code == -signal.SIGKILL, output
    code, output = run.train(*twice)
    assert code == 0, output
    assert told(await steps_of(run)) == expected
    trained_at: dict[str, list[int]] = {}
    for step in await steps_of(run):
        for item in step.data:
            trained_at.setdefault(item, []).append(step.step)
    assert {len(steps) for steps in trained_at.values()} == {2}
    assert all(later - earlier >= 2 for earlier, later in trained_at.values())
    async with await run.open() as store:
        documents = await store.database["DBRecordData"].find().to_list()
    assert {document["_id"]: document["trained_at_steps"] for document in documents} == trained_at


async def test_a_second_trainer_is_refused_and_one_that_is_replaced_ends_and_says_so(run: Run) -> None:
    await run.fill(finished=False)
    with run.start("--lease_seconds", "3") as process:
        await has_steps(run, 3)
        code, output = run.train()
        assert code == 1
        assert "this run has a trainer" in output
        assert str(process.pid) in output
        async with await run.open() as store:
            await store.database["TrainerLease"].update_one(
                {"_id": "trainer"}, {"$set": {"owner": "another"}, "$inc": {"attempt": 1}}
            )
        code, output = process.wait(60)
    assert code == 1
    assert "has been replaced by another" in output


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("short_transactions")
async def test_a_trainer_paused_past_its_lease_changes_nothing_when_it_goes_on(run: Run) -> None:
    await run.fill()
    with run.start("--lease_seconds", "3", fault="pause") as process:
        await paused_past_its_lease(run, process)
        code, output = run.train("--learning_rate", "1e-3")
        assert code == 0, output
        left = await what_is_left(run)
        process.signal(signal.SIGCONT)
        code, output = process.wait(100)
    assert code == 1, output
    assert "has been replaced by another" in output
    assert "Traceback" not in output
    assert {key: value for key, value in (await what_is_left(run)).items() if key in left} == left


async def paused_past_its_lease(run: Run, process: Forked) -> None:
    status = Path(f"/proc/{process.pid}/status")

    def is_paused() -> bool:
        assert process.runs, process.output
        return "T (stopped)" in status.read_text()

    await until(is_paused, 90)
    async with await run.open() as store:
        expires = (await store.trainer_lease.read()).lease_expires_at
    assert expires is not None
    await until(lambda: datetime.now(UTC) > expires)


async def what_is_left(run: Run) -> dict[str, Any]:
    """The documents of the versions, and the inode of each folder of a checkpoint or a version."""
    async with await run.open() as store:
        versions = await store.policy_versions.all()
        for version in versions:
            verify(version.location, version.files)
    places = [*run.output.glob("checkpoint-*"), *run.output.glob("undone-*"), *run.output.glob("weights/v*")]
    return {"versions": versions, **{str(path): path.stat().st_ino for path in places}}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("a file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.timeout(240)
async def test_a_full_disk_pauses_training_until_there_is_space(run: Run, small_disk: Path) -> None:
    await run.fill()
    filler = small_disk / "filler"
    flags = ["--max_staleness", "1", "--staleness_policy", "decay", "--out_of_date_decay", "0.1"]
    with run.start("--output_dir", str(small_disk / "output"), *flags) as process:
        await until(lambda: "training from step 0" in process.output, 100)
        await asyncio.to_thread(fill_disk, filler)
        await until(lambda: "training pauses at step" in process.output, 100)
        async with await run.open() as store:
            ahead = await store.steps.last()
            newest = await store.policy_versions.latest()
        assert ahead is not None
        assert newest is not None
        assert ahead.step == newest.step + 2
        filler.unlink()
        code, output = await asyncio.to_thread(process.wait, 100)
    assert code == 0, output
    async with await run.open() as store:
        assert [version.step for version in await store.policy_versions.all()][-1] == 3


def fill_disk(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as sink:
        while True:
            sink.write(bytes(1 << 20))


async def test_no_data_in_time_is_told(run: Run) -> None:
    code, output = run.train("--data_wait_seconds", "0.5")
    assert code == 1
    assert "fewer than 2 groups became ready within 0.5 s" in output
    assert "agentrl sample" in output


async def test_a_run_that_trained_nothing_says_why_and_exits_with_an_error(run: Run) -> None:
    async with await run.open() as store:
        await store.tasks.load([_task(order, name) for order, name in enumerate(GROUPS)])
        common: dict[str, Any] = {"traj_id": 0, "attempt": 1, "split": "train", "epoch": 0, "query": "?"}
        failure = Failure(kind="scorer", message="no judge gave a verdict")
        failed = [
            Record(id=f"{name}/0/1", task=name, status=RecordStatus.FAILED, failure=failure, **common)
            for name in GROUPS[:4]
        ]
        common["abandoned_because"] = "no spread in the group's scores"
        abandoned = [
            Record(id=f"{name}/0/1", task=name, status=RecordStatus.ABANDONED, **common)
            for name in GROUPS[4:]
        ]
        await store.database["Record"].insert_many([item.to_document() for item in [*failed, *abandoned]])
    code, output = run.train()
    assert code == 1, output
    assert "every group is sampled, and none could be trained" in output
    assert "4 scorer: no judge gave a verdict" in output
    assert "2 abandoned: no spread in the group's scores" in output
    assert f"agentrl db reopen --run_name {run.name}" in output
    assert "the end of the data" not in output


async def test_a_database_that_is_not_there_is_told(run: Run) -> None:
    unreachable = Run("x", "mongodb://127.0.0.1:1/?directConnection=true", run.base, run.folder)
    code, output = unreachable.train("--db_timeout_seconds", "1", "--db_wait_seconds", "1")
    assert code == 1
    assert "127.0.0.1:1" in output


async def test_adapters_a_reference_and_several_updates_a_step(run: Run) -> None:
    await run.fill()
    flags = (
        "--lora_rank", "4", "--kl_coef", "0.05", "--num_epochs_per_batch", "2", "--mini_batches", "2",
        "--old_logprobs", "recompute", "--warmup_ratio", "0.5",
    )  # fmt: skip
    code, output = run.train("--max_steps", "3", *flags)
    assert code == 0, output
    committed = await steps_of(run)
    assert [step.metrics["updates"] for step in committed] == [4, 4, 4]
    assert all(step.metrics["kl_reference"] > 0 for step in committed[1:])
    kept = {path.name for path in (run.output / "checkpoint-000003" / "model").iterdir()}
    assert "adapter_model.safetensors" in kept
    assert "model.safetensors" not in kept
    async with await run.open() as store:
        first, *versions = await store.policy_versions.all()
    assert {(each.encoding, each.base) for each in versions} == {("adapter", 0)}
    assert {file.name for file in versions[-1].files} == {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    assert versions[-1].bytes < first.bytes / 4


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", [(), ("--cp_size", "2"), ("--pp_size", "2")], ids=["fsdp", "cp", "pp"])
async def test_two_processes_train_as_one_does_and_one_goes_on_from_them(
    run: Run, whole: Run, layout: tuple[str, ...]
) -> None:
    await run.fill()
    code, output = run.launch("--max_steps", "2", *layout, program=TORCHRUN)
    assert code == 0, output
    code, output = run.train()
    assert code == 0, output
    together, expected = told(await steps_of(run)), told(await steps_of(whole))
    assert [step[:2] for step in together] == [step[:2] for step in expected]
    assert [step[2] for step in together] == pytest.approx([step[2] for step in expected], rel=1e-4)


def newest_weights(output: Path) -> dict[str, Tensor]:
    """The tensors of the last version, in the files of all ranks."""
    files = max((output / "weights").glob("v*")).glob("*.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.timeout(240)
async def test_accelerate_starts_two_processes_that_train_adapters_as_one_does(run: Run) -> None:
    flags = ("--lora_rank", "3", "--kl_coef", "0.05", "--num_epochs_per_batch", "2", "--publish", "full")
    await run.fill()
    code, output = run.launch(*flags, program=ACCELERATE)
    assert code == 0, output
    assert "rank 1 of 2" in output
    alone = run.beside("alone")
    await alone.fill()
    assert alone.train(*flags)[0] == 0
    together, expected = await steps_of(run), await steps_of(alone)
    await alone.drop()
    assert [step.data for step in together] == [step.data for step in expected]
    for name in ("loss", "grad_norm", "kl_reference"):
        wanted = [step.metrics[name] for step in expected]
        assert [step.metrics[name] for step in together] == pytest.approx(wanted, rel=1e-3, abs=1e-6), name
    assert expected[-1].metrics["kl_reference"] > 0
    kept = {path.name for path in (run.output / "checkpoint-000003" / "model").iterdir()}
    assert kept >= {"adapter_model.safetensors"}
    assert "model.safetensors" not in kept
    ours, theirs = (newest_weights(item.output) for item in (run, alone))
    plain = load_file(run.base / "model.safetensors")
    assert ours.keys() == theirs.keys() == plain.keys()
    assert any(not ours[name].equal(plain[name]) for name in plain)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)


def test_a_mesh_that_does_not_divide_the_processes_is_told_with_its_equation(run: Run) -> None:
    code, output = run.train("--tp_size", "2")
    assert code == 2
    assert "pp 1 × dp_replicate 1 × dp_shard × cp 1 × ep 1 × tp 2 = 1" in output
