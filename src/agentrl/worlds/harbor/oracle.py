"""Check Harbor tasks by their own solutions: ``agentrl try DIR --oracle``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.documents.task import Task
from agentrl.documents.task_file import TaskSource
from agentrl.documents.task_json import BadTaskError, make_task
from agentrl.errors import AgentRLError, ConfigError
from agentrl.observe.terminal import clean
from agentrl.worlds.harbor.environment import Harbor
from agentrl.worlds.harbor.source import NAME

_SAID = 300
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Checked:
    """What the tests of a task say of its untouched container and of its solution."""

    name: str
    untouched: float | None
    solved: float | None
    seconds: float
    problem: str | None

    @property
    def is_right(self) -> bool:
        """Return whether the solution has a higher reward than no work at all."""
        return self.untouched is not None and self.solved is not None and self.solved > self.untouched

    @property
    def line(self) -> str:
        """Return the row of a table."""
        rewards = [
            f"{'–' if value is None else format(value, 'g'):>9}" for value in (self.untouched, self.solved)
        ]
        said = "" if self.problem is None else f"  {clean(self.problem)}"
        return f"{clean(self.name):<32}{''.join(rewards)}{self.seconds:>9.1f}{said}"


async def check_solutions(source: TaskSource, line: int | None, *, at_once: int) -> int:
    """Run the tests of each task without work and after its solution, and print a table.

    Returns 0 if every solution has the higher reward, else 1. Tasks that cannot run here are printed. Raises
    ConfigError if ``source`` has other tasks than Harbor's, or none that runs.
    """
    tasks: list[Task] = []
    refused: list[str] = []
    for item in source.items():
        if line is not None and item.line != line:
            continue
        try:
            if isinstance(item.value, BadTaskError):
                raise item.value
            tasks.append(make_task(item.value, "try", 1))
        except BadTaskError as error:
            refused.append(clean(str(error)))
    if other := [task.task_id for task in tasks if task.environment != NAME]:
        raise ConfigError(
            f"{source.path}: {clean(other[0])} is not a Harbor task",
            hint="--oracle runs the solutions of Harbor tasks: give a folder with task.toml",
        )
    if not tasks:
        raise _nothing_runs(source, line, refused)
    for why in refused:
        print(f"refused  {why}")
    print(f"{'task':<32}{'untouched':>9}{'solution':>9}{'seconds':>9}")
    checked = await _check_all(tasks, at_once)
    wrong = [each.name for each in checked if not each.is_right]
    if wrong:
        print(f"the solution does not help in {len(wrong)} of {len(checked)} tasks: {', '.join(wrong[:10])}")
    return 1 if wrong else 0


def _nothing_runs(source: TaskSource, line: int | None, refused: Sequence[str]) -> ConfigError:
    """Return the error for a source of which no task runs: what is refused, why, and what to do."""
    if not refused:
        which = "" if line is None else f" {line}"
        return ConfigError(f"{source.path} has no task{which}", hint="--line N is the N-th task by name")
    more = [f"and {len(refused) - _SHOWN} more"] if len(refused) > _SHOWN else []
    return ConfigError(
        "\n  ".join([f"none of {len(refused)} tasks of {source.path} runs here:", *refused[:_SHOWN], *more]),
        hint="correct what each line names; --rootfs FILE.tar runs all tasks on one root file system without"
        " Docker: docs/harbor.md",
    )


async def _check_all(tasks: Sequence[Task], at_once: int) -> list[Checked]:
    slots = asyncio.Semaphore(at_once)

    async def check(task: Task) -> Checked:
        async with slots:
            checked = await check_task(task)
        print(checked.line, flush=True)
        return checked

    return await asyncio.gather(*map(check, tasks))


async def check_task(task: Task) -> Checked:
    """Run the tests of a task in a fresh container, and in another after its solution."""
    started = time.monotonic()
    rewards: dict[str, float] = {}
    problems = []
    for what in ("untouched", "solution"):
        environment = None
        try:
            environment = await asyncio.to_thread(Harbor, task)
            await environment.setup()
            done = await environment.solve() if what == "solution" else None
            if done is not None and not done.succeeded:
                said = (done.stderr.strip() or done.stdout.strip())[-_SAID:]
                problems.append(
                    f"solve.sh ended with {done.exceeded or f'exit code {done.exit_code}'}: {said}"
                )
            rewards[what] = await environment.reward()
        except (AgentRLError, BadTaskError, OSError) as error:
            problems.append(f"{what}: {error}")
        finally:
            if environment is not None:
                await asyncio.shield(environment.teardown())
    seconds, problem = time.monotonic() - started, "; ".join(problems) or None
    return Checked(task.task_id, rewards.get("untouched"), rewards.get("solution"), seconds, problem)
