"""``agentrl teach --self`` on a real run: a delta, calls that span versions, deleted weights, a restart."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_run as run
import torch
from forked import run_forked
from ready_data import ready_data
from safetensors.torch import load_file
from test_two_steps import SAMPLING, TRAINING, Answering
from tiny_policy import write_tiny_policy
from transformers import AutoModelForCausalLM
from waiting import until

from agentrl.base.concurrency import background
from agentrl.columns import pool as pool_module
from agentrl.columns import version_logprobs as module
from agentrl.columns.version_logprobs import teach_self
from agentrl.config.load import Configs
from agentrl.config.schema import GROUPS, GroupConfig, RunConfig
from agentrl.config.training import VERSION_LOGPROBS
from agentrl.data.forest import forest_from_data
from agentrl.documents.model_call import VersionSpan
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import ColumnStatus, RecordStatus, StepStatus, StopReason
from agentrl.errors import ConfigError
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store
from agentrl.store.groups import read_columns
from agentrl.weights.delta import SUFFIX, encode
from agentrl.weights.folder import MANIFEST, TensorChecksum, checksums, weights_digest
from agentrl.weights.publish import publish_base

pytestmark = pytest.mark.integration

TASK = "train/0/spans"
IDS = [10, 20, 0, 1, 2, 3, 11, 20, 0, 1, 2, 3]
"""The first trajectory: two calls of four generated tokens each."""
PLACES = (2, 3, 4, 5, 8, 9, 10, 11)
VERSIONS = (1, 1, 1, 2, 2, 2, 2, 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_POLL_SECONDS", 0.05)
    monkeypatch.setattr(pool_module, "LONGEST_POLL_SECONDS", 0.05)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_tiny_policy(tmp_path / "base")


@pytest.fixture
async def configs(
    store: Store, run_config: RunConfig, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Configs:
    """The flags of a filler of a run whose newest version is a delta, and a group that waits."""
    monkeypatch.chdir(tmp_path)
    values = {
        **vars(run_config), "model_name_or_path": str(base), "max_attempts": 2, "retry_backoff_seconds": 1e-6,
    }  # fmt: skip
    await join_trainer(store, old_logprobs="version")
    await publish_base(store, base)
    await publish_two(store, base, tmp_path / "weights")
    await run.add_task(store, TASK, 0)
    for value in (0.0, 1.0):
        claimed = await run.claim(store)
        first, second = run.call(claimed, 0, 1, 2), run.call(claimed, 1, 2, 8)
        spans = (VersionSpan(version=1, start=0, end=3), VersionSpan(version=2, start=3, end=4))
        for call in (replace(first, versions=spans, routing=b""), replace(second, routing=b"")):
            await store.model_calls.add(claimed, call)
        await store.records.advance(claimed, RecordStatus.COMPLETED, stop_reason=StopReason.ANSWERED)
        await store.records.advance(claimed, RecordStatus.SCORING)
        await store.attempts.score(claimed, value, {"scorer": "exact"})
    assert await finalize(store) == 0
    return Configs.of(GROUPS, values, values)


async def join_trainer(store: Store, **flags: Any) -> None:
    """Store what a trainer does at its start."""
    values = {"dtype": "float32", "autocast_bf16": "false", "max_tokens": 64, **flags}
    await store.settings.join("train", values, given=(), packages={})


async def publish_two(store: Store, base: Path, root: Path) -> None:
    """Publish version 1, the base's weights, and version 2: every tenth element of them 0.01 larger."""
    before = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    after = {
        name: tensor + 0.01 * (torch.rand(tensor.shape, generator=generator) < 0.1)
        for name, tensor in before.items()
    }
    whole, delta = root / "v000001", root / "v000002"
    shutil.copytree(base, whole)
    os.makedirs(delta)
    encode(before, after, delta / f"rank-0{SUFFIX}")
    for number, folder, weights in ((1, whole, before), (2, delta, after)):
        tensors = {name: TensorChecksum.of(tensor) for name, tensor in weights.items()}
        content = {"tensors": {name: each.to_json() for name, each in tensors.items()}}
        (folder / MANIFEST).write_text(json.dumps(content))
        await store.policy_versions.publish(
            PolicyVersion(
                id=number, step=number, location=str(folder), files=checksums(folder), train_step=None,
                encoding="full" if number == 1 else "delta", base=None if number == 1 else 1,
                digest=weights_digest(tensors),
            )
        )  # fmt: skip


async def finalize(store: Store) -> int:
    config = GroupConfig(columns=VERSION_LOGPROBS)
    return await GroupFinalizer(store, config, split="train", seed=0).run_waiting()


async def teach(configs: Configs) -> int:
    return await asyncio.wait_for(teach_self(configs, until_empty=True), 60)


def logprobs_at(folder: Path, weights: dict[str, torch.Tensor] | None = None) -> list[float]:
    """Return what a plain model of these weights gives each generated token of the first trajectory."""
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        found = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return [float(found[place - 1, IDS[place]]) for place in PLACES]


async def test_each_token_is_computed_at_its_own_version_by_one_model(
    store: Store, configs: Configs, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    plain = module.VersionLogprobs._load

    async def load(values: Any, version: PolicyVersion) -> None:
        if values._loaded != version.id:
            loaded.append(version.id)
        await plain(values, version)

    monkeypatch.setattr(module.VersionLogprobs, "_load", load)
    assert await teach(configs) == 2
    assert loaded == [1, 2]  # both trajectories at version 1, then both at version 2
    (column,) = (await read_columns(store.connection, [f"{TASK}/0/1"]))[f"{TASK}/0/1"]
    assert column.by == f"{base} in float32"
    copied = load_file(".agentrl/weights/" + store.run_name + "/old_logprobs/model/model.safetensors")
    at = {1: logprobs_at(base), 2: logprobs_at(base, copied)}
    expected = [at[version][place] for place, version in enumerate(VERSIONS)]
    np.testing.assert_allclose(np.frombuffer(column.values, "<f4"), expected, atol=1e-5)
    assert max(abs(one - other) for one, other in zip(at[1], at[2], strict=True)) > 1e-3
    assert await finalize(store) == 1
    data = await store.training.fetch([item.id for item in await ready_data(store, "train")])
    columns = forest_from_data(data).columns
    assert columns is not None
    np.testing.assert_allclose(columns.values[VERSION_LOGPROBS][:8], expected, atol=1e-5)


async def test_a_filler_that_is_stopped_between_two_versions_is_followed_by_another(
    store: Store, configs: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ends while it loads version 2, and hands its claims back: nothing is filled in half."""
    plain, died = module.VersionLogprobs._load, asyncio.Event()

    async def hang(values: Any, version: PolicyVersion) -> None:
        if version.id == 2:
            died.set()
            await asyncio.Event().wait()
        await plain(values, version)

    monkeypatch.setattr(module.VersionLogprobs, "_load", hang)
    first = asyncio.create_task(teach_self(configs, until_empty=True))
    await asyncio.wait_for(died.wait(), 60)
    first.cancel()
    await asyncio.wait([first], timeout=30)
    assert await store.columns.waiting(VERSION_LOGPROBS) == {"": 2}
    monkeypatch.setattr(module.VersionLogprobs, "_load", plain)
    assert await teach(configs) == 2
    assert await finalize(store) == 1


DIES = """
import os, signal, sys
from agentrl.weights import local_copy
change = local_copy._change_tensor
def change_one(*arguments):
    change(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
local_copy._change_tensor = change_one
from agentrl.cli.main import main
main(sys.argv[1:])
"""
"""``agentrl`` in a process that is killed when it has changed the first tensor of its copy."""


async def test_two_fillers_of_a_host_have_two_copies_and_heal_that_of_a_killed_one(
    store: Store, configs: Configs, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"model_name_or_path": base, "lease_seconds": 1, "teacher_concurrency": 1}
    words = [f"--{name}={value}" for name, value in (vars(configs[RunConfig]) | flags).items() if value]
    killed = ("-c", DIES), ["teach", "--self", *words], tmp_path / "killed.log", 60.0
    code, said = await asyncio.to_thread(run_forked, *killed)
    assert code == -signal.SIGKILL, said
    folder = tmp_path / ".agentrl" / "weights" / store.run_name
    half = json.loads((folder / "old_logprobs" / "state.json").read_text())
    assert (half["version"], half["applying"]) == (1, [2])

    plain, both = module.VersionLogprobs._load, asyncio.Barrier(2)

    async def meet(values: Any, version: PolicyVersion) -> None:
        if version.id == 2:
            await asyncio.wait_for(both.wait(), 30)
        await plain(values, version)

    monkeypatch.setattr(module.VersionLogprobs, "_load", meet)
    one = configs.with_flags({"teacher_concurrency": 1})
    assert await asyncio.gather(teach(one), teach(one)) == [1, 1]
    models = [folder / name / "model" / "model.safetensors" for name in ("old_logprobs", "old_logprobs-2")]
    weights = [load_file(model) for model in models]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    at = {1: logprobs_at(base), 2: logprobs_at(base, weights[0])}
    expected = [at[version][place] for place, version in enumerate(VERSIONS)]
    (column,) = (await read_columns(store.connection, [f"{TASK}/0/1"]))[f"{TASK}/0/1"]
    np.testing.assert_allclose(np.frombuffer(column.values, "<f4"), expected, atol=1e-5)
    assert await finalize(store) == 1


@pytest.mark.parametrize("lost", ["version", "base"])
async def test_deleted_weights_give_the_trajectories_up_at_once_and_by_name(
    store: Store, configs: Configs, lost: str
) -> None:
    await store.policy_versions.mark_pruned([2 if lost == "version" else 1])
    assert await teach(configs) == 0
    columns = await read_columns(store.connection, [f"{TASK}/0/1", f"{TASK}/1/1"])
    assert [(item.status, item.failures) for (item,) in columns.values()] == [(ColumnStatus.FAILED, 1)] * 2
    assert await finalize(store) == 1
    records = await store.records.by_task(TASK)
    number = 2 if lost == "version" else 1
    assert {record.abandoned_because for record in records} == {
        f"its column version_logprobs was given up: the weights of policy version {number}, which sampled"
        " tokens of it, are deleted"
    }


async def test_versions_of_open_groups_are_needed(store: Store, configs: Configs) -> None:
    assert await store.groups.oldest_version("train") == 1
    await run.add_task(store, "train/0/calling", 1)
    calling = await run.claim(store)
    later = {"published_at": datetime.now(UTC) + timedelta(hours=1)}
    await store.database["PolicyVersion"].update_one({"_id": 2}, {"$set": later})
    assert await store.groups.oldest_version("train") == 0, "engines may have served version 0"
    await store.database["Record"].update_one({"_id": calling.record_id}, {"$set": {"min_version": 2}})
    assert await store.groups.oldest_version("train") == 1
    await store.database["Task"].delete_one({"_id": calling.task.id})
    await teach(configs)
    assert await finalize(store) == 1
    assert await store.groups.oldest_version("train") is None


async def test_a_run_of_another_old_policy_is_refused(
    store: Store, run_config: RunConfig, base: Path
) -> None:
    values = {**vars(run_config), "model_name_or_path": str(base), "teacher_wait_seconds": 0.0}
    configs = Configs.of(GROUPS, values, values)
    with pytest.raises(ConfigError, match="no trainer has begun run"):
        await teach_self(configs, until_empty=True)
    await join_trainer(store, old_logprobs="recompute")
    with pytest.raises(ConfigError, match="is trained with --old_logprobs recompute"):
        await teach_self(configs, until_empty=True)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("starts_warm")
async def test_a_sampler_a_filler_and_a_trainer_give_both_figures(
    store: Store, run_config: RunConfig, base: Path, tmp_path: Path
) -> None:
    """All groups are sampled at version 0: step 1 trains tokens of age 0, and step 2 of age 1."""
    lines = [{"id": f"t{number}", "query": "Say a.", "answer": "a", "scorer": "exact"} for number in range(8)]
    tasks, columns = tmp_path / "tasks.jsonl", ("--columns", VERSION_LOGPROBS)
    await asyncio.to_thread(tasks.write_text, "\n".join(map(json.dumps, lines)))
    common = [
        "--run_name", run_config.run_name, "--db_connection_string", str(run_config.db_connection_string),
        "--log_dir", run_config.log_dir, "--output_dir", str(run_config.output_dir),
        "--model_name_or_path", str(base),
    ]  # fmt: skip
    commands = {
        "sample": ["--train_file", str(tasks), *SAMPLING, *columns],
        "teach": ["--self", "--weights_dir", str(tmp_path / "copies")],
        "train": [*SAMPLING, *TRAINING, *columns, "--old_logprobs", "version"],
    }
    started: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, flags: Sequence[str]) -> None:
        with (tmp_path / f"{name}.txt").open("wb") as log:
            words = [sys.executable, "-m", "agentrl", name, *common, *flags]
            started[name] = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)

    try:
        async with Answering().serving() as engine, background(engine.follow(store)):
            for name, flags in commands.items():
                start(name, flags)
            others = (started["sample"], started["teach"])
            await until(
                lambda: started["train"].poll() is not None or any(each.poll() for each in others), 200
            )
    finally:
        for process in started.values():
            process.kill()
            process.wait(10)
    said = {name: (tmp_path / f"{name}.txt").read_text(errors="replace")[-3000:] for name in commands}
    assert started["train"].returncode == 0, said
    first, second = await store.steps.find(status=StepStatus.COMMITTED)
    assert (first.metrics["staleness_max"], second.metrics["staleness_max"]) == (0.0, 1.0), said
    assert first.metrics["version_gap"] < 1e-5
    assert first.metrics["kl_staleness"] == 0.0
    assert second.metrics["kl_staleness"] > 0.0
    # The engine made up its logprobs, those of version 0 in both steps: an equal mismatch at both ages.
    assert second.metrics["kl_mismatch"] == pytest.approx(first.metrics["kl_mismatch"], rel=0.2)
