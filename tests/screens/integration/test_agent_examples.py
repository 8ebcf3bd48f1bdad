"""The examples of a LangGraph agent and of two roles: sampled by a scripted engine, checked, and trained."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from db_command import violations
from environment_packages import needs_packages
from example_training import train_steps
from fake_llm import fake_llm
from loaded_tasks import load_tasks
from test_sampling import Setting, quick, task
from tiny_policy import write_tiny_policy

from agentrl.config.load import parse
from agentrl.config.schema import AgentConfig, RunConfig, TaskConfig, ToolConfig
from agentrl.documents.status import RecordStatus
from agentrl.lab.rescore import RescoreOptions, rescore_run
from agentrl.observe.terminal import stdout_console
from agentrl.screens.trajectory_page import render_trajectory
from agentrl.screens.views.read import WholeTrajectory
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick", "starts_warm")]

__all__ = ["quick"]

EXAMPLES = Path(__file__).parents[3] / "assets" / "examples"
SECRET = "sk-of-the-critic-0123456789abcdef"
SMALL = (
    "--num_generations", "2", "--groups_per_step", "2", "--max_staleness", "9", "--max_steps", "2",
    "--max_tokens", "16384", "--publish_steps", "2", "--data_wait_seconds", "60",
)  # fmt: skip


def calculate_first(answers: Mapping[str, str]) -> Callable[[str], str]:
    """Call the calculator, then answer what it said, or a wrong number every second time of a query."""
    counts = {query: itertools.count() for query in answers}

    def say(prompt: str) -> str:
        query = next(query for query in answers if query in prompt)
        if "tool\n" in prompt:
            right = prompt.rpartition("tool\n")[2].partition("<")[0]
            return f"<answer>{right if next(counts[query]) % 2 else -1}</answer>"
        expression = re.findall(r"[-+*/ ()\d.]*\d[-+*/ ()\d.]*", query)[-1].strip(" .=")
        return (
            f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
        )

    return say


@needs_packages
@pytest.mark.timeout(240)
async def test_the_langgraph_example_samples_and_trains_two_steps(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("langgraph", reason="not installed: langgraph (pip install -e '.[langgraph]')")
    monkeypatch.syspath_prepend(str(EXAMPLES / "langgraph_math"))
    monkeypatch.chdir(EXAMPLES.parents[1])
    flags = [
        "--config", str(EXAMPLES / "langgraph_math" / "run.yml"), "--run_name", run_config.run_name, *SMALL,
    ]  # fmt: skip
    configs = parse(flags, command="agentrl sample", description="", shown=())
    tasks = configs[TaskConfig]
    address = str(tasks.train_file).replace("n=2000", "n=4")
    await load_tasks(
        store, run_config, replace(tasks, train_file=address), address, split="train", num_generations=2
    )
    stored = await store.tasks.find("train")
    assert {item.agent_name for item in stored} == {"math_graph:build_graph"}
    answers = {item.query: str(item.answer) for item in stored}
    agent = configs[AgentConfig]
    async with ToolPool(ToolConfig()) as tools:
        setting = Setting(
            store, calculate_first(answers), tools=tools, agent_cfg_path=agent.agent_cfg_path,
            max_turns=agent.max_turns, max_prompt_tokens=agent.max_prompt_tokens,
            prompt_reserve_tokens=agent.prompt_reserve_tokens,
        )  # fmt: skip
        setting.engine.version = 0
        await setting.run()
    records = [record for item in stored for record in await store.records.by_task(item.id)]
    assert [record.failure for record in records] == [None] * 8
    assert {record.turns for record in records} == {2}
    assert {record.train_rule for record in records} == {"all"}
    assert sorted(record.score or 0.0 for record in records)[4:] == [1.0] * 4, "the calculator is right"
    calls = await store.model_calls.by_record(records[0].id)
    assert [call.parent for call in calls] == [None, calls[0].id]
    assert await violations(store) == []
    again = await rescore_run(store, RescoreOptions(dry_run=True))
    assert (again.errors, again.splits["train"].changed) == ([], 0)
    await train_steps(store, run_config, flags, write_tiny_policy(tmp_path / "model"))


def solve_and_judge() -> Callable[[str], str]:
    """Answer 3 first; the final answers and the verdicts of the policy differ between trajectories."""
    finals = itertools.cycle(("<answer>3</answer>", "<answer>4</answer>"))
    verdicts = itertools.cycle(("Yes.", "No."))

    def say(prompt: str) -> str:
        if "begin with yes or no" in prompt:
            return next(verdicts)
        return next(finals) if "A critic says" in prompt else "I think <answer>3</answer>"

    return say


@pytest.mark.parametrize("critic", ["policy", "fixed"])
async def test_the_solver_and_the_critic_are_trained_by_their_own_rewards(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    critic: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "solver_critic"))
    monkeypatch.setenv("CRITIC_KEY", SECRET)
    is_fixed = critic == "fixed"
    await store.tasks.load([task("a", agent_name="solver_critic:solver_critic")])
    async with fake_llm() as llm:
        llm.replies["large"] = ["Yes.", "No."]
        file = tmp_path / "agent.yml"
        file.write_text(
            f"critic: {{base_url: '{llm.url}', model: large, api_key_env: CRITIC_KEY}}"
            if is_fixed
            else "rounds: 1",
            encoding="utf-8",
        )
        setting = Setting(store, solve_and_judge(), agent_cfg_path=str(file))
        setting.engine.version = 0
        await setting.run()
        assert llm.keys == [f"Bearer {SECRET}"] * (2 if is_fixed else 0)
    records = sorted(await setting.records("train/0/a"), key=lambda record: -(record.score or 0.0))
    assert [record.status for record in records] == [RecordStatus.READY] * 2
    assert [record.role_rewards["solver"] for record in records] == [1.0, 0.0]
    assert {record.role_rewards["critic"] for record in records} == {0.0, 1.0}
    assert records[0].call_roles == ("solver", "critic", "solver")
    data = {item.id: item for item in await store.training.fetch([record.id for record in records])}
    for record in records:
        calls = await store.model_calls.by_record(record.id)
        assert [call.role for call in calls] == ["solver", "critic", "solver"]
        solver = 1.0 if record.score else -1.0
        own = 1.0 if record.role_rewards["critic"] else -1.0
        spans = {span.call: span.advantage for span in data[record.id].spans}
        assert spans == pytest.approx({0: solver, 2: solver} if is_fixed else {0: solver, 1: own, 2: solver})
        assert (record.context_resets, record.prompt_tokens) == (0, calls[2].prompt_tokens)
    stdout_console().print(render_trajectory(WholeTrajectory(record=records[0], calls=calls)))
    shown = capsys.readouterr().out
    assert "critic" in shown
    assert ("fixed model large" in shown) is is_fixed
    assert await violations(store) == []
    stored = await store.database.list_collection_names(filter={"type": "collection"})
    for name in [name for name in stored if not name.startswith("system.")]:
        async for document in store.database[name].find():
            assert SECRET not in str(document)
    again = await rescore_run(store, RescoreOptions(dry_run=True))
    assert (again.errors, again.splits["train"].changed) == ([], 0)


@pytest.mark.parametrize("example", ["langgraph_math", "solver_critic"])
def test_its_page_is_short(example: str) -> None:
    lines = (EXAMPLES / example / "README.md").read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 12
