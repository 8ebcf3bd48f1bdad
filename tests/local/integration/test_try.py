"""``agentrl try``: one trajectory on a real engine, printed, and nothing stored."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chat_models import KEEPS_ALL, write_model
from served_engine import Served, serve_locally
from test_sampling import task
from tiny_policy import write_tiny_policy

from agentrl.config.load import Configs, parse
from agentrl.config.run import URI_VARIABLES
from agentrl.config.schema import RunConfig
from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.errors import ConfigError, ModelError, RunMissingError, TaskFileError
from agentrl.inference.engines.commands import free_port
from agentrl.local.local_cli import TryConfig
from agentrl.local.mongod import EmbeddedMongo
from agentrl.local.try_task import try_task
from agentrl.store.client import Store
from agentrl.store.run_list import Runs
from agentrl.worlds.harness.agent import RETURN_SECONDS

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]

EXAMPLES = Path(__file__).parents[3] / "assets" / "examples"
QUESTION = {"query": "What is\x1b]0;owned\x07 1+1?", "answer": "2", "scorer": "exact"}


@pytest.fixture(scope="module")
def engine(starts_warm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A local engine with the tiny model."""
    with serve_locally(
        write_tiny_policy(tmp_path_factory.mktemp("try") / "model"), max_total_tokens=8192
    ) as engine:
        yield engine


def reverse_text(text: str) -> str:
    """Reverse a text."""
    return text[::-1]


def flags(run: RunConfig, *words: str) -> Configs:
    where = ("--run_name", run.run_name, "--db_connection_string", str(run.db_connection_string))
    return parse(
        [*where, "--max_new_tokens", "8", "--max_turns", "2", *words], command="agentrl try", description="",
        shown=[], extra=[TryConfig],
    )  # fmt: skip


async def test_the_embedded_server_is_started_where_no_server_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in URI_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    model = ("--model_name_or_path", str(write_model(tmp_path / "model", KEEPS_ALL)))
    configs = parse(
        ["--mongo_dir", str(tmp_path / "mongo"), *model], command="agentrl try", description="", shown=[],
        extra=[TryConfig],
    )  # fmt: skip
    mongo = EmbeddedMongo(tmp_path / "mongo")
    try:
        for _ in range(2):
            assert await try_task(configs, json.dumps(QUESTION), line=None, engine_url=None, prompt=True) == 0
        assert mongo.status().running
    finally:
        mongo.down()
    out, err = capsys.readouterr()
    assert out.count("1+1?") == 2
    assert err.count("MongoDB started") == 1


async def test_a_task_is_tried_and_nothing_is_stored(
    engine: Served, store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = flags(run_config, "--model_name_or_path", str(engine.folder))
    given = json.dumps(QUESTION)
    assert await try_task(configs, given, line=None, engine_url=engine.url) == 0
    shown = capsys.readouterr().out
    assert "turn 1 ·" in shown
    whole, model_calls = re.findall(r"UTC · ([0-9.]+) s|model calls ([0-9.]+) s", shown)
    assert float(whole[0]) >= float(model_calls[1]) - 0.06
    assert "length_limit_error" in shown
    assert "expected   2" in shown
    assert "SCORED  score 0.000" in shown
    assert "\x1b]0" not in shown

    file = tmp_path / "tasks.jsonl"
    unscorable = {"id": "x", "query": "?", "scorer": "math:sqrt"}
    unanswerable = {"id": "z", "query": "?", "scorer": "f1"}
    rows = (unscorable, {"id": "y", **QUESTION}, unanswerable)
    file.write_text("\n".join(map(json.dumps, rows)))
    assert await try_task(configs, str(file), line=None, engine_url=engine.url) == 1
    assert "failed     scorer: " in capsys.readouterr().out
    assert await try_task(configs, str(file), line=2, engine_url=engine.url) == 0
    assert "task try/0/y" in capsys.readouterr().out
    with pytest.raises(TaskFileError, match="scorer f1 compares with an answer, and the task has none"):
        await try_task(configs, str(file), line=3, engine_url=engine.url)
    with pytest.raises(TaskFileError, match="no task begins on line 9"):
        await try_task(configs, str(file), line=9, engine_url=engine.url)

    service = InferenceService(id="e", url=engine.url, engine="local", model="tiny", host="h", pid=1)
    await store.services.register(service)
    await store.services.beat("e", status=ServiceStatus.READY, policy_version=0, running_requests=0)
    await store.tasks.load([task("a")])
    before = await store.tasks.get("train/0/a")
    assert await try_task(configs, "a", line=None, engine_url=None) == 0
    assert "task train/0/a" in capsys.readouterr().out
    assert await store.tasks.get("train/0/a") == before
    assert await store.database["Record"].count_documents({}) == 0
    assert await store.database["DispatchedSamplingTask"].count_documents({}) == 0
    with pytest.raises(ConfigError, match="is neither a task of run"):
        await try_task(configs, "b", line=None, engine_url=None)


async def test_an_agent_that_is_a_client_gets_a_gateway_for_the_trial(
    engine: Served,
    store: Store,
    run_config: RunConfig,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "openai_loop"))
    words = ("--model_name_or_path", str(engine.folder), "--agent_name", "openai_loop:openai_loop")
    configs = flags(run_config, *words)
    assert await try_task(configs, json.dumps(QUESTION), line=None, engine_url=engine.url) == 0
    shown = capsys.readouterr().out
    assert "turn 1 ·" in shown
    assert "SCORED  score 0.000" in shown
    assert "train rule main: it chooses" in shown
    assert "100% of" in shown.replace("\n", " ")
    names = await store.database.client.list_database_names()
    assert not [name for name in names if name.startswith("agentrl_try")]
    assert await store.database["DispatchedSamplingTask"].count_documents({}) == 0


async def test_the_error_of_a_harness_is_its_own_and_told_at_once(
    engine: Served, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = tmp_path / "harness.yml"
    harness.write_text("{command: 'echo no such option >&2; exit 3', isolation: limits}")
    words = ("--model_name_or_path", str(engine.folder), "--agent_name", "command")
    configs = flags(run_config, *words, "--agent_cfg_path", str(harness))
    began = time.monotonic()
    assert await try_task(configs, json.dumps(QUESTION), line=None, engine_url=engine.url) == 1
    assert time.monotonic() - began < RETURN_SECONDS
    shown = " ".join(capsys.readouterr().out.split())
    assert "failed harness: the harness ended with exit code 3" in shown
    assert "no such option" in shown


async def test_an_engine_that_cannot_be_reached_is_the_failure_at_once(
    run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = flags(run_config, "--model_name_or_path", str(write_tiny_policy(tmp_path / "model")))
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    assert await try_task(configs, json.dumps(QUESTION), line=None, engine_url=url) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "failed engine: " in shown
    assert "cannot be reached: ConnectionRefusedError" in shown


async def test_the_local_engine_serves_the_model_where_no_engine_is_named(
    engine: Served, run_config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = flags(run_config, "--model_name_or_path", str(engine.folder))
    assert await try_task(configs, json.dumps(QUESTION), line=None, engine_url=None) == 0
    out, err = capsys.readouterr()
    assert f"no engine is named: the local engine starts with {engine.folder}" in err
    assert "SCORED  score 0.000" in out


async def test_what_is_missing_for_an_engine_is_said_at_once(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    given = json.dumps(QUESTION)
    with pytest.raises(ConfigError, match="has no live engine, and none is named; no model is named"):
        await try_task(flags(run_config), given, line=None, engine_url=None)
    sglang = flags(run_config, "--engine", "sglang", "--model_name_or_path", str(tmp_path))
    with pytest.raises(ConfigError, match="a trial does not start --engine sglang"):
        await try_task(sglang, given, line=None, engine_url=None)
    with pytest.raises(ModelError, match="has no config"):
        await try_task(
            flags(run_config, "--model_name_or_path", str(tmp_path)), given, line=None, engine_url=None
        )
    nobody = replace(run_config, run_name=f"{run_config.run_name}_none")
    with pytest.raises(ConfigError, match="no model is named, and no run has one for this trial"):
        await try_task(flags(nobody), given, line=None, engine_url=None)
    with pytest.raises(RunMissingError):
        await try_task(flags(nobody), "a_task", line=None, engine_url=None)
    names = await store.database.client.list_database_names()
    assert nobody.run_name not in names
    assert not [name for name in names if name.startswith("agentrl_try")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_trial_that_is_stopped_leaves_nothing(
    engine: Served, store: Store, run_config: RunConfig, tmp_path: Path, number: int, code: int
) -> None:
    harness = tmp_path / "harness.yml"
    harness.write_text("{command: 'sleep 600', isolation: limits}")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentrl", "try", json.dumps(QUESTION),
        *("--db_connection_string", str(run_config.db_connection_string), "--agent_name", "command"),
        *("--agent_cfg_path", str(harness), "--engine_url", engine.url),
        *("--model_name_or_path", str(engine.folder)),
    )  # fmt: skip
    databases, runs = store.connection.databases, Runs(store.connection)
    try:
        async with asyncio.timeout(100):
            holders: list[str] = []
            while not holders:
                assert process.returncode is None
                await asyncio.sleep(0.2)
                trials = [name for name in await databases() if name.startswith("agentrl_try")]
                holders = [each for name in trials for each in await runs.holders(name, 30.0)]
            assert [holder.startswith("sampler try-") for holder in holders] == [True]
            process.send_signal(number)
            assert await process.wait() == code
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert trials[0] not in await databases()


@pytest.mark.parametrize("shows_tools", [True, False])
async def test_the_prompt_is_printed_and_tools_that_it_lacks_are_named(
    run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], shows_tools: bool
) -> None:
    template = KEEPS_ALL if shows_tools else KEEPS_ALL.replace("{%- if tools %}", "{%- if false %}")
    write_model(tmp_path, template)
    words = ("--model_name_or_path", str(tmp_path), "--tools", "test_try:reverse_text")
    configs = flags(run_config, *words, "--system_prompt", "Be brief.")
    assert await try_task(configs, json.dumps(QUESTION), line=None, engine_url=None, prompt=True) == 0
    printed = capsys.readouterr()
    assert "<|im_start|>system" in printed.out
    assert "Be brief." in printed.out
    assert "1+1?" in printed.out
    assert ("reverse_text" in printed.out) == shows_tools
    assert ("does not name the tools reverse_text" in printed.err) != shows_tools


def test_errors_of_the_command_have_exit_codes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl", "try"]
    url = ("--engine_url", "http://127.0.0.1:9", "--model_name_or_path", str(tmp_path))
    wrong = json.dumps({**QUESTION, "scorer": "exakt"})
    done = subprocess.run([*command, wrong, *url], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "did you mean 'exact'" in done.stderr
