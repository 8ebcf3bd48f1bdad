"""Unmodified harnesses solve a task by calls of their own tools, and are recorded token by token."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from installed_harnesses import ROOT, InstalledRun, call, require_harness

from agentrl.base.concurrency import end_tasks
from agentrl.documents.status import RecordStatus, StopReason
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

EXAMPLES = ROOT / "assets" / "examples"
THOUGHT = "<think>\nThe number first.\n</think>\n\nI look at the file.\n\n"


@dataclass(frozen=True)
class Harness:
    """A harness, and how the model uses its tools."""

    name: str
    command: str
    config: str
    read: Callable[[str], str]
    """The call that reads a file of the working directory."""
    second: str
    """Another call of the same answer."""
    write: Callable[[str, str], str]
    side: Callable[[str], str | None] = lambda prompt: None
    """The answer to a call that is not the conversation's."""
    side_calls: int = 0
    last: str = "It is written."


def title(prompt: str) -> str | None:
    """Answer opencode's request for a title."""
    return "Doubling" if "Generate a title" in prompt else None


def greeting(prompt: str) -> str | None:
    """Answer the sub-agent of Claude Code."""
    return None if "double.txt" in prompt else "Hello from the sub-agent."


HARNESSES = [
    Harness(
        "openai-agents", "agents-python", "openai_agents/harness.yml",
        lambda path: call("read_file", name="number.txt"), call("read_file", name="number.txt"),
        lambda path, text: call("write_file", name="double.txt", text=text),
    ),
    Harness(
        "mini-swe-agent", "mini", "claude_code/mini_swe_agent.yml",
        lambda path: call("bash", command="cat number.txt"), call("bash", command="ls"),
        lambda path, text: call("bash", command=f"echo {text} > double.txt"),
        last=call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
    Harness(
        "claude-code", "claude", "claude_code/claude_code.yml",
        lambda path: call("Read", file_path=f"{path}/number.txt"),
        call("Agent", description="greet", prompt="Say hello.", subagent_type="general-purpose",
             run_in_background=False),
        lambda path, text: call("Write", file_path=f"{path}/double.txt", content=text),
        side=greeting, side_calls=1,
    ),
    Harness(
        "opencode", "opencode", "claude_code/opencode.yml",
        lambda path: call("read", filePath=f"{path}/number.txt"),
        call("bash", command="ls", description="List files"),
        lambda path, text: call("write", filePath=f"{path}/double.txt", content=text),
        side=title, side_calls=1,
    ),
    Harness(
        "qwen-code", "qwen", "claude_code/qwen_code.yml",
        lambda path: call("read_file", file_path=f"{path}/number.txt"),
        # It may lose what a command prints just before it ends, and then another prompt follows.
        call("run_shell_command", command="ls; sleep 0.5", description="List", is_background=False),
        lambda path, text: call("write_file", file_path=f"{path}/double.txt", content=text),
    ),
    Harness(
        "codex", "codex", "claude_code/codex.yml",
        lambda path: call("exec_command", cmd="cat number.txt"), call("exec_command", cmd="ls"),
        lambda path, text: call("exec_command", cmd=f"echo {text} > double.txt"),
    ),
]  # fmt: skip


def script_of(harness: Harness) -> Callable[[str], str]:
    """Read and make a second call at once, write, and end."""

    def say(prompt: str) -> str:
        aside = harness.side(prompt)
        if aside is not None:
            return aside
        place = re.findall(r"[\w/.-]*/workspace\b", prompt)
        folder = place[0] if place else ""
        turns = prompt.count("<|im_start|>assistant")
        if turns == 1:
            return f"{THOUGHT}{harness.read(folder)}\n{harness.second}"
        if turns == 2:
            found = re.findall(r"number is (\d+)", prompt)
            return f"Now I write it.\n\n{harness.write(folder, str(2 * int(found[-1])))}"
        return harness.last

    return say


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
async def test_a_harness_solves_a_task_and_is_recorded_exactly(store: Store, harness: Harness) -> None:
    require_harness(harness.name, harness.command)
    run = InstalledRun(store, EXAMPLES / harness.config, script_of(harness))
    record = await run.run("The number is 7341.", "14682")
    assert record.failure is None, record.failure.message
    assert (record.status, record.stop_reason) == (RecordStatus.SCORED, StopReason.ANSWERED)
    assert record.harness is not None
    assert record.harness.changed_files == ("double.txt",)
    assert ((record.final_answer or "").strip(), record.score) == ("14682", 1.0)
    assert len(run.main) == 3
    assert len(run.calls) == 3 + harness.side_calls
    run.check_exact(record)


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
async def test_a_harness_whose_sampler_was_lost_goes_on_where_it_was(store: Store, harness: Harness) -> None:
    require_harness(harness.name, harness.command)
    path, calls = EXAMPLES / harness.config, 3 + harness.side_calls
    lost = InstalledRun(store, path, script_of(harness), hangs_at=calls - 1)
    running = asyncio.create_task(lost.run("The number is 7341.", "14682"))
    await lost.engine.hangs.wait()
    await store.claims.heartbeat([lost.claim], 0.0)
    run = InstalledRun(store, path, script_of(harness))
    record = await run.run("The number is 7341.", "14682")
    await end_tasks(running)
    assert record.failure is None, record.failure.message
    assert ((record.final_answer or "").strip(), record.score) == ("14682", 1.0)
    last = record.owners[-1]
    assert (last.replayed, last.dropped, len(run.engine.outputs)) == (calls - 1, 0, 1)
    run.engine.prompts = [*lost.engine.prompts, *run.engine.prompts]
    run.engine.outputs = [*lost.engine.outputs, *run.engine.outputs]
    run.check_exact(record)


def compacting(prompt: str) -> str:
    """Print much until the context is full; a summary is asked for, and the conversation begins anew."""
    if "a <summary> block" in prompt[-2000:]:
        return "<summary>Lines were printed.</summary>"
    if "Lines were printed." in prompt:
        return "It is done."
    return call("Bash", command="seq 1000 1400", description="Print lines")


async def test_a_harness_that_compacts_its_context_makes_branches(store: Store) -> None:
    require_harness("claude-code", "claude")
    run = InstalledRun(store, EXAMPLES / "claude_code/claude_code.yml", compacting, max_prompt_tokens=16_000)
    record = await run.run("The number is 7341.", "14682")
    assert record.failure is None, record.failure.message
    summary, after = run.calls[-2:]
    assert run.main == tuple(run.calls[:-2])
    assert len(run.main) >= 3
    assert summary.parent in {call.id for call in run.main}
    assert (after.parent, after.response["content"]) == (None, "It is done.")
    run.check_exact(record)
