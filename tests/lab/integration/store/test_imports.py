"""What samplers may import: what an operator loaded, and what a sampler's user cannot add to."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
import re
from pathlib import Path

import pytest
from db_command import agentrl_db
from loaded_tasks import load_tasks

from agentrl.base.user_code import is_allowed
from agentrl.cli.tasks import main
from agentrl.config.load import Configs
from agentrl.config.schema import AgentConfig, GroupConfig, RunConfig, TaskConfig, ToolConfig
from agentrl.rollout.setup import allow_configured_imports
from agentrl.store.client import open_existing, open_store

pytestmark = [pytest.mark.integration, pytest.mark.attack]


def task_file(folder: Path, name: str, scorer: str) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps({"id": name, "query": "2 + 2?", "answer": "4", "scorer": scorer}) + "\n")
    return str(path)


def load(run: RunConfig, file: str, *more: str) -> None:
    assert run.db_connection_string is not None
    flags = ["--run_name", run.run_name, "--db_connection_string", run.db_connection_string]
    assert main(["load", file, *flags, *more]) == 0


def allowed_by(run: RunConfig, *names: str, train_file: str | None = None, modules: str = "") -> list[bool]:
    """Which names a sampler with these flags may import."""
    tasks = TaskConfig(train_file=train_file, allowed_modules=modules)
    configs: Configs = {
        TaskConfig: tasks, AgentConfig: AgentConfig(), ToolConfig: ToolConfig(), GroupConfig: GroupConfig(),
        RunConfig: run,
    }  # fmt: skip

    async def start() -> list[bool]:
        async with await open_existing(run) as store:
            if train_file is not None:
                await load_tasks(store, run, tasks, train_file, split="train", num_generations=8)
            await allow_configured_imports(store, configs)
        return [is_allowed(name) for name in names]

    return contextvars.copy_context().run(lambda: asyncio.run(start()))


def test_a_sampler_imports_what_an_operator_loaded_and_its_own_flags_name(
    run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("mine", "theirs"):
        (tmp_path / f"{module}.py").write_text("async def close(context): return 1.0\n")
    names = ("mine:close", "theirs:close", "json:loads", "sys:exit")
    load(run_config, task_file(tmp_path, "a", "mine:close"))
    assert allowed_by(run_config, *names) == [True, False, False, False]
    capsys.readouterr()
    asyncio.run(agentrl_db(run_config, "users", "--create"))
    uri = re.search(r"^agentrl_sampler +made +(\S+)$", capsys.readouterr().out, re.MULTILINE)
    sampler = dataclasses.replace(run_config, db_connection_string=uri[1])
    stolen = task_file(tmp_path, "b", "theirs:close")
    load(sampler, stolen, "--append")
    assert "may not write Imports: start samplers with --allowed_modules theirs" in capsys.readouterr().out
    assert allowed_by(run_config, *names) == [True, False, False, False]
    assert allowed_by(sampler, *names, modules="json, sys.x") == [True, False, True, False]
    assert allowed_by(sampler, *names, train_file=stolen) == [True, True, False, False]
    asyncio.run(_drop(run_config))


async def _drop(run: RunConfig) -> None:
    async with await open_store(run) as store:
        await store.database.command("dropAllUsersFromDatabase")
        await store.database.client.drop_database(run.run_name)
