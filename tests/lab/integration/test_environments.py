"""Environments in samplers: named failures, idempotent loading, other samplers, scores from stored values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import number_game
import pytest
import small_run as run
from db_command import violations
from loaded_tasks import load_tasks
from test_sampling import Setting, quick, task

from agentrl.cli import tasks as tasks_command
from agentrl.config.schema import RunConfig, SamplingConfig, TaskConfig, ToolConfig
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Task
from agentrl.errors import ConfigError, TaskFileError
from agentrl.lab.rescore import RescoreOptions, rescore_run
from agentrl.rollout.preflight import probe
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick")]

__all__ = ["quick"]

FAULTS = {
    ("init", "raise"): "__init__ of environment faulty raised RuntimeError: no such game",
    ("setup", "raise"): "setup of environment faulty raised RuntimeError: no such game",
    ("setup", "exit"): "setup of environment faulty raised SystemExit: 3",
    ("setup", "hang"): "setup of environment faulty took longer than 1 s",
    ("step", "raise"): "step of environment faulty raised RuntimeError",
    ("observation", ""): "returned 'not an observation'",
    ("reward", "raise"): "reward of environment faulty raised RuntimeError",
    ("number", ""): "reward of environment faulty returned 'good'",
}


@pytest.fixture
async def tools(store: Store, tmp_path: Path) -> AsyncIterator[ToolPool]:
    """Tools of no server, and a published version."""
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    async with ToolPool(ToolConfig()) as pool:
        yield pool


def faulty(where: str, does: str) -> Task:
    return task(
        f"{where} {does}", slots=1, environment="faulty", scorer="environment", agent_name="multi_turn",
        meta={"in": where, "does": does}, tools=(),
    )  # fmt: skip


async def test_an_environment_that_raises_or_hangs_ends_its_own_trajectory_by_name(
    store: Store, tools: ToolPool
) -> None:
    number_game.Faulty.torn_down.clear()
    good = [faulty("none", ""), faulty("teardown", "raise")]
    await store.tasks.load([*(faulty(*fault) for fault in FAULTS), *good])
    setting = Setting(store, "hello", tools=tools, claims={"max_attempts": 1}, environment_timeout=1.0)
    setting.engine.version = 0
    await setting.run()
    assert setting.sampler.scored == len(good)
    for (where, does), message in FAULTS.items():
        (record,) = await setting.records(f"train/0/{where} {does}")
        assert record.status is RecordStatus.FAILED
        assert (record.failure.kind, message in record.failure.message) == ("environment", True), (
            record.failure
        )
    for item in good:
        assert [record.score for record in await setting.records(item.id)] == [1.0]
    opened = {f"{where} {does}" for where, does in FAULTS if where != "init"}
    assert opened | {item.task_id for item in good} == set(number_game.Faulty.torn_down)
    assert await violations(store) == []


async def load(store: Store, config: RunConfig, address: str) -> None:
    await load_tasks(store, config, TaskConfig(), address, split="train", num_generations=2)


async def test_an_address_loads_once_and_any_sampler_plays_its_tasks(
    store: Store, run_config: RunConfig, tools: ToolPool
) -> None:
    for _ in range(2):
        await load(store, run_config, "env:number_game?n=3&seed=3")
    with pytest.raises(TaskFileError, match="does not have 1 tasks of this one"):
        await load(store, run_config, "env:number_game?n=4&seed=3")
    stored = await store.tasks.find("train")
    assert len(stored) == 3
    assert {item.environment for item in stored} == {"number_game"}
    await probe(store, tools, SamplingConfig(), "train")
    secrets = {item.id: item.meta["secret"] for item in stored}
    guesses = iter(range(10_000))
    setting = Setting(store, lambda prompt: str(next(guesses) % 9 + 1), tools=tools)
    setting.engine.version = 0
    await setting.run()
    for key, secret in secrets.items():
        for record in await setting.records(key):
            assert record.score == float(record.final_answer == str(secret))
            assert record.tool_rewards == {"environment": {"calls": [], "state": record.score}}
    report = await rescore_run(store, RescoreOptions(scorer="environment", dry_run=True))
    assert report.errors == []
    assert all(split.changed == 0 for split in report.splits.values())
    assert await violations(store) == []


async def test_an_environment_whose_tasks_change_is_refused(
    store: Store, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "env:number_game?n=2&seed=3"
    await load(store, run_config, address)

    def other(cls: type, request: Any) -> list[dict[str, Any]]:
        return [{"query": "another question", "secret": 1}] * request.n

    monkeypatch.setattr(number_game.NumberGame, "tasks", classmethod(other))
    with pytest.raises(TaskFileError, match="with another text"):
        await load(store, run_config, address)


async def test_an_unknown_environment_is_found_before_the_first_claim(store: Store, tools: ToolPool) -> None:
    await store.tasks.load([task("a", environment="nowhere:Game", scorer="environment")])
    with pytest.raises(ConfigError, match="the environment 'nowhere:Game' cannot be imported"):
        await probe(store, tools, SamplingConfig(), "train")


async def test_the_command_loads_an_address_and_lists_the_path_that_samplers_may_import(
    store: Store, run_config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    from asyncio import to_thread

    flags = [
        "--run_name",
        run_config.run_name,
        "--db_connection_string",
        str(run_config.db_connection_string),
    ]
    address = "env:number_game:NumberGame?n=4&seed=1"
    for loaded in (4, 0):
        assert await to_thread(tasks_command.main, ["load", address, *flags]) == 0
        assert f"{loaded} tasks loaded" in capsys.readouterr().out
    assert await store.imports.paths() == {"number_game:NumberGame"}
