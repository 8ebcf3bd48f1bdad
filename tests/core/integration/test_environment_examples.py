"""The example environments: their flags, sampled by a scripted engine, then two steps of a tiny model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from environment_packages import needs_packages
from example_training import train_steps
from loaded_tasks import load_tasks
from test_sampling import Setting, quick
from tiny_policy import write_tiny_policy

from agentrl.config.load import parse
from agentrl.config.schema import AgentConfig, RunConfig, TaskConfig, ToolConfig
from agentrl.documents.status import RecordStatus
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick", "starts_warm"), needs_packages]

__all__ = ["quick"]

EXAMPLES = Path(__file__).parents[3] / "assets" / "examples"
SMALL = (
    "--num_generations", "2", "--groups_per_step", "2", "--max_staleness", "9", "--max_steps", "2",
    "--max_tokens", "16384", "--publish_steps", "2", "--data_wait_seconds", "60", "--task_selection", "order",
)  # fmt: skip


def solve(answers: Mapping[str, str]) -> Callable[[str], str]:
    """Answer right and wrong in turn."""
    count = itertools.count()

    def say(prompt: str) -> str:
        right = next(answer for query, answer in answers.items() if query in prompt)
        return f"<answer>{right if next(count) % 2 else 'unknown'}</answer>"

    return say


def guess(answers: Mapping[str, str]) -> Callable[[str], str]:
    """Guess one number after the other."""
    count = itertools.count()
    return lambda prompt: f"[{next(count) * 7 % 20 + 1}]"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("example", "script"), [("reasoning_gym_mixture", solve), ("textarena_game", guess)])
async def test_the_example_samples_and_trains_two_steps(
    store: Store,
    run_config: RunConfig,
    tmp_path: Path,
    example: str,
    script: Callable[..., Callable[[str], str]],
) -> None:
    flags = ["--config", str(EXAMPLES / example / "run.yml"), "--run_name", run_config.run_name, *SMALL]
    configs = parse(flags, command="agentrl sample", description="", shown=())
    tasks = configs[TaskConfig]
    address = str(tasks.train_file).replace("n=2000", "n=8")
    await load_tasks(
        store, run_config, replace(tasks, train_file=address), address, split="train", num_generations=2
    )
    stored = await store.tasks.find("train")
    answers = {task.query: str(task.answer) for task in stored}
    async with ToolPool(ToolConfig()) as tools:
        agent = configs[AgentConfig]
        setting = Setting(
            store, script(answers), tools=tools, agent_name=agent.agent_name,
            max_prompt_tokens=agent.max_prompt_tokens, prompt_reserve_tokens=agent.prompt_reserve_tokens,
        )  # fmt: skip
        setting.engine.version = 0
        await setting.run()
    records = [record for task in stored for record in await store.records.by_task(task.id)]
    assert len(records) == 16
    assert all(record.score is not None and record.failure is None for record in records)
    assert sum(record.status is RecordStatus.READY for record in records) >= 8
    await train_steps(store, run_config, flags, write_tiny_policy(tmp_path / "model"))


@pytest.mark.parametrize("example", ["reasoning_gym_mixture", "textarena_game", "openenv"])
def test_its_page_is_short(example: str) -> None:
    lines = (EXAMPLES / example / "README.md").read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 12
