"""Rows of GSM8K as verl prepares them, in Parquet: loaded, sampled, scored, trained for three steps."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from example_training import train_steps
from loaded_tasks import load_tasks
from test_sampling import Setting, quick
from tiny_policy import write_tiny_policy

from agentrl.config.load import parse
from agentrl.config.schema import AgentConfig, RunConfig, TaskConfig, ToolConfig
from agentrl.documents.status import RecordStatus
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick", "starts_warm")]
__all__ = ["quick"]

SUFFIX = ' Let\'s think step by step and output the final answer after "####".'
STEPS = 3


@pytest.mark.timeout(240)
async def test_rows_of_verl_are_sampled_scored_and_trained(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Ann has {number} apples and buys 3. How many?{SUFFIX}"}],
            "ability": "math", "reward_model": {"style": "rule", "ground_truth": str(number + 3)},
            "extra_info": {"split": "train", "index": number, "answer": f"so\n#### {number + 3}"},
        }
        for number in range(2 * STEPS)
    ]  # fmt: skip
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    flags = [
        "--run_name", run_config.run_name, "--train_file", str(file), "--agent_name", "single_turn",
        "--num_generations", "2", "--groups_per_step", "2", "--max_staleness", "9", "--max_steps", str(STEPS),
        "--max_tokens", "4096", "--max_prompt_tokens", "2048", "--max_new_tokens", "512",
        "--publish_steps", str(STEPS), "--data_wait_seconds", "60",
    ]  # fmt: skip
    configs = parse(flags, command="agentrl sample", description="", shown=())
    await load_tasks(store, run_config, configs[TaskConfig], str(file), split="train", num_generations=2)
    turns = itertools.count()

    def say(prompt: str) -> str:
        """Answer right and wrong in turn."""
        number = re.findall(r"Ann has (\d+) apples", prompt)[-1]
        return f"She has #### {int(number) + 3 * (next(turns) % 2)}"

    async with ToolPool(ToolConfig()) as tools:
        setting = Setting(store, say, tools=tools, agent_name=configs[AgentConfig].agent_name)
        setting.engine.version = 0
        await setting.run()
    stored = await store.tasks.find("train")
    records = [record for task in stored for record in await store.records.by_task(task.id)]
    assert sorted(task.task_id for task in stored) == [
        f"openai/gsm8k/{number}" for number in range(2 * STEPS)
    ]
    assert all(record.status is RecordStatus.READY and record.failure is None for record in records)
    assert sorted(record.score for record in records if record.score is not None) == [0.0] * 6 + [1.0] * 6
    await train_steps(store, run_config, flags, write_tiny_policy(tmp_path / "model"), steps=STEPS)
