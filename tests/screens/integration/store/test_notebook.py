"""``agentrl.screens.notebook.Store``: a run read synchronously, also inside a running event loop."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import small_run as run

from agentrl.config.schema import RunConfig
from agentrl.documents.model_call import ToolExecution
from agentrl.errors import StoreError
from agentrl.screens.notebook import Store
from agentrl.store.client import Store as AsyncStore

pytestmark = pytest.mark.integration


def opened(config: RunConfig) -> Store:
    return Store.open(config.run_name, db_connection_string=config.db_connection_string)


async def test_trajectories_steps_and_tasks(store: AsyncStore, run_config: RunConfig, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    with opened(run_config) as notebook:
        trained = notebook.trajectories(step=1)
        ready = notebook.trajectories(status="ready", limit=1)
        steps = notebook.steps(status="committed")
        tasks, groups = notebook.tasks(split="train"), notebook.groups()
    assert sorted(row.id for row in trained) == sorted((await store.steps.find())[0].data)
    assert all(row.trained_at_steps == (1,) for row in trained)
    assert len(ready) == 1
    assert [row.step for row in steps] == [1]
    assert {row.task_id for row in tasks} <= {row.task_id for row in groups}
    calls = await store.model_calls.by_record(trained[0].id)
    assert len(trained[0].token_ids) == sum(len(call.context_ids + call.output_ids) // 4 for call in calls)
    assert asdict(trained[0])["token_ids"].tolist() == trained[0].token_ids.tolist()


async def test_tokens_and_messages_of_several_calls(store: AsyncStore, run_config: RunConfig) -> None:
    await run.add_task(store, "train/0/g", 0, generations=1)
    claim = await run.claim(store)
    execution = ToolExecution(name="t", arguments={}, result="7", error=False, seconds=0.1)
    first = replace(run.call(claim, 0, 0, 2), tool_executions=(execution,))
    second = replace(run.call(claim, 1, 0, 8), messages=({"role": "tool", "execution": 0},))
    for call in (first, second):
        await store.model_calls.add(claim, call)
    with opened(run_config) as notebook:
        (trajectory,) = notebook.trajectories()
    assert [message["role"] for message in trajectory.messages][-3:] == ["assistant", "tool", "assistant"]
    assert trajectory.messages[-2]["content"] == "7"
    generated = trajectory.versions >= 0
    assert generated.sum() == trajectory.generated_tokens == first.generated_tokens + second.generated_tokens
    assert np.array_equal(np.isnan(trajectory.logprobs), ~generated)
    assert trajectory.token_ids.dtype == np.int32


async def test_a_closed_store_and_a_run_that_does_not_exist(store: AsyncStore, run_config: RunConfig) -> None:
    notebook = opened(run_config)
    assert notebook.trajectories() == []
    notebook.close()
    notebook.close()
    with pytest.raises(StoreError, match="there is no run"):
        opened(replace(run_config, run_name="nothing_there"))


async def test_rows_become_a_data_frame(store: AsyncStore, run_config: RunConfig, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    await run.build(store, tmp_path / "weights")
    with opened(run_config) as notebook:
        table = pandas.DataFrame(notebook.trajectories())
    assert {"id", "score", "messages", "token_ids", "logprobs", "versions"} <= set(table.columns)
