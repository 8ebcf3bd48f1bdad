"""What no retry can fix: found before the first claim, it stops the process and consumes nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_llm import fake_llm
from rollout_fakes import FakeTools
from test_sampling import Setting, task
from tiny_policy import write_tiny_policy

from agentrl.config.schema import GroupConfig, RunConfig, SamplingConfig, ToolConfig
from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus
from agentrl.errors import ConfigError
from agentrl.rollout.preflight import probe
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]

JUDGE = """\
scorer_agent:
  models: [{model: judge, base_url: "http://127.0.0.1:9/v1", api_key: none}]
"""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scorer": "exakt"}, "did you mean 'exact'"),
        ({"scorer": "0.5*exact + 0.5*fromat"}, "did you mean 'format'"),
        ({"scorer": "module_of_another_host:score"}, "No module named 'module_of_another_host'"),
        ({"scorer": "broken_module:score"}, "RuntimeError: no licence"),
        ({"agent_name": "nobody"}, "unknown agent 'nobody'"),
        ({"answer_schema": "two words"}, "answer_schema is 'two words'"),
        ({"tools": ("nowhere",)}, "unknown tool server nowhere"),
        ({"scorer": "agentcpm"}, "none.yml cannot be read"),
        ({"scorer": "reward_model"}, "none.yml cannot be read"),
        ({"slots": 1}, "--num_generations is 1, so no group's scores can differ"),
    ],
)
async def test_what_tasks_name_is_tried(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    await store.tasks.load([task("good"), task("bad", **fields)])
    sampling = SamplingConfig(agent_config_path=str(tmp_path / "none.yml"))
    async with ToolPool(ToolConfig()) as tools:
        with pytest.raises(ConfigError) as caught:
            await probe(store, tools, sampling, "train", GroupConfig())
    assert message in str(caught.value)
    assert "nothing is claimed" in str(caught.value)
    if "slots" not in fields:
        assert "task 'train/0/bad'" in str(caught.value)


async def test_what_can_be_used_passes_and_a_judge_that_is_away_is_a_warning(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge = tmp_path / "judge.yml"
    judge.write_text(JUDGE)
    await store.tasks.load([task("a", tools=()), task("b", scorer="asearcher"), task("c", scorer="math")])
    await store.tasks.load([task("d", split="eval", slots=1)])
    sampling = SamplingConfig(agent_config_path=str(judge))
    await probe(store, FakeTools(), sampling, "train", GroupConfig())
    assert "the judge cannot be reached now" in caplog.text
    await probe(store, FakeTools(), sampling, "eval")
    await probe(store, FakeTools(), sampling, "nothing is loaded", GroupConfig())


async def test_a_server_that_is_no_reward_model_is_refused_and_one_that_is_down_is_a_warning(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await store.tasks.load([task("a", scorer="0.5*exact + 0.5*reward_model")])
    folder = str(write_tiny_policy(tmp_path / "model"))
    async with fake_llm(tmp_path) as server:
        path = server.write_config("reward_model", "m", folder=folder)
        server.path = "/generate"
        with pytest.raises(ConfigError, match="reward_model: m: server error: HTTP 404"):
            await probe(store, FakeTools(), SamplingConfig(agent_config_path=path), "train", GroupConfig())
        server.path, server.replies = None, {"": [503]}
        await probe(store, FakeTools(), SamplingConfig(agent_config_path=path), "train", GroupConfig())
    assert "the reward model cannot be reached now" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"agent_name": "nobody"}, "unknown agent 'nobody'"),
        ({"scorer": "nowhere"}, "unknown scorer 'nowhere'"),
        ({"answer_schema": "two words"}, "answer_schema is 'two words'"),
    ],
)
async def test_what_is_loaded_later_stops_the_sampler_and_no_slot_fails(
    store: Store, fields: dict[str, Any], message: str
) -> None:
    await store.tasks.load([task("a", slots=1, **fields)])
    setting = Setting(store, "<answer>4</answer>", claims={"max_attempts": 1})
    with pytest.raises(ConfigError) as caught:
        await setting.run()
    assert message in str(caught.value)
    found = await store.tasks.get("train/0/a")
    assert found is not None
    (slot,) = found.slots
    assert (slot.status, slot.owner, slot.released) == (SlotStatus.OPEN, None, slot.attempt)
    assert {record.status for record in await setting.records("train/0/a")} == {RecordStatus.RELEASED}
    again = Setting(store, "<answer>3</answer>", claims={"max_attempts": 1})
    corrected = {"agent_name": None, "scorer": "exact", "answer_schema": "answer"}
    await store.tasks.load([task("a", slots=1, **corrected)], update=True)
    await again.run()
    assert (await store.tasks.counts("train"))[TaskStatus.COMPLETED] == 1


async def test_a_judge_without_a_configuration_stops_the_sampler_and_the_trajectory_stays_sampled(
    store: Store,
) -> None:
    await store.tasks.load([task("a", slots=1, scorer="agentcpm")])
    setting = Setting(store, "<answer>4</answer>", claims={"max_attempts": 1})
    config = SamplingConfig(agent_config_path="no_such.yml")
    object.__setattr__(setting.worker, "sampling", config)
    with pytest.raises(ConfigError, match=r"no_such.yml cannot be read"):
        await setting.run()
    found = await store.tasks.get("train/0/a")
    assert found is not None
    (slot,) = found.slots
    assert (slot.status, slot.owner) == (SlotStatus.SAMPLED, None)
    assert {record.status for record in await setting.records("train/0/a")} == {RecordStatus.COMPLETED}


async def test_a_host_without_pythonpath_leaves_the_tasks_to_the_others(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    model = write_tiny_policy(tmp_path / "model")
    await store.tasks.load([task("a", scorer="own_scorer:score")])
    await store.imports.add(["own_scorer:score"])
    command = [
        sys.executable, "-m", "agentrl", "sample", "--run_name", run_config.run_name,
        "--db_connection_string", str(run_config.db_connection_string), "--log_dir", run_config.log_dir,
        "--model_name_or_path", str(model), "--num_generations", "2",
    ]  # fmt: skip
    without = {**os.environ, "PYTHONPATH": ""}
    done = await asyncio.to_thread(
        subprocess.run, command, env=without, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2, done.stderr
    assert "No module named 'own_scorer'" in done.stderr
    assert "PYTHONPATH" in done.stderr
    assert "Traceback" not in done.stderr
    found = await store.tasks.get("train/0/a")
    assert found is not None
    assert found.status is TaskStatus.CREATED
    assert {slot.attempt for slot in found.slots} == {0}
