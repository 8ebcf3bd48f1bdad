"""Print the result of a quickstart: rewards, files, trajectories worth reading, commands to try next."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from agentrl.config.schema import RunConfig
from agentrl.observe.terminal import excerpt
from agentrl.store.views.read import WholeTrajectory
from agentrl.store.views.rows import TrajectoryRow

if TYPE_CHECKING:
    from agentrl.store.client import Store

RIGHT = 0.5
"""A trajectory is right when its score is above this."""

EXCERPT_CHARS = 96

ENDS = 3
"""Number of steps at each end of the run over which the reward is averaged."""


@dataclass(frozen=True)
class WorthReading:
    """One trajectory: why it is worth reading, and a few lines of it."""

    title: str
    record_id: str
    score: float
    version: int | None
    """The oldest policy version of its tokens."""
    tokens: int
    """Generated tokens."""
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """The rewards and the cost of the committed steps, and the trajectories to look at."""

    rewards: list[float]
    seconds: float
    """Median time of forward, backward and optimizer in a step."""
    tokens: float
    """Mean number of tokens computed per step."""
    call_tokens: float
    """Mean number of tokens per step if every model call were a row of its own."""
    sampled: int
    """Number of trajectories in finished groups."""
    abandoned: int
    """Number of these that did not become training data."""
    worth_reading: list[WorthReading]
    plot: Path

    @property
    def first(self) -> float:
        """The mean reward of the first three steps."""
        return fmean(self.rewards[:ENDS])

    @property
    def last(self) -> float:
        """The mean reward of the last three steps."""
        return fmean(self.rewards[-ENDS:])


async def read_outcome(run_name: str, output: Path) -> Outcome | None:
    """Read the rewards from the database and plot them; None if there is no step."""
    from agentrl.observe.plotting import plot_curve
    from agentrl.store.client import open_store

    async with await open_store(RunConfig(run_name=run_name)) as store:
        steps = await store.steps.find()
        if not steps:
            return None
        plot = output / "curve.png"
        plot_curve(run_name, await store.views.steps(), plot)
        metrics = [step.metrics for step in steps]
        groups = await store.details.groups()
        return Outcome(
            rewards=[float(item["reward"]) for item in metrics],
            seconds=median(item["seconds_forward_backward"] + item["seconds_optimizer"] for item in metrics),
            tokens=fmean(item["unique_tokens"] for item in metrics),
            call_tokens=fmean(item["total_tokens"] for item in metrics),
            sampled=sum(item.trajectories for item in groups),
            abandoned=sum(item.trajectories - item.trained for item in groups),
            worth_reading=await read_worth_reading(store),
            plot=plot,
        )


def print_report(run_name: str, output: Path, outcome: Outcome) -> None:
    """Print the summary; its last line is ``reward FIRST -> LAST over N steps``."""
    agentrl = own_command()
    lines = [
        "",
        f"a step      {outcome.seconds:.1f} s of training (median), {outcome.tokens:,.0f} tokens computed"
        f" for model calls of {outcome.call_tokens:,.0f}",
        f"sampled     {outcome.sampled} trajectories; {outcome.abandoned} of them are abandoned",
        f"plot        {outcome.plot}",
        f"checkpoint  {max(output.glob('checkpoint-*'), default=output)}",
        f"database    {run_name} in .agentrl/mongo (the server ends now; `{agentrl} mongo up` starts it)",
        "",
        "next, try:",
        f"  {agentrl} mongo up",
        f"  {agentrl} dashboard",
        f"  {agentrl} audit run --run_name {run_name}",
        "",
        *worth_reading_lines(outcome.worth_reading, f"{agentrl} audit record", run_name),
        f"reward {outcome.first:.3f} -> {outcome.last:.3f} over {len(outcome.rewards)} steps",
    ]
    print("\n".join(lines), flush=True)


def own_command() -> str:
    """Return how a shell in this folder starts ``agentrl``: by its name if it finds it, else by its path."""
    script = Path(sys.executable).with_name("agentrl")
    if shutil.which("agentrl") == str(script):
        return "agentrl"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


def worth_reading_lines(chosen: Sequence[WorthReading], command: str, run_name: str) -> list[str]:
    """Return the excerpts, each with the command that shows the whole trajectory."""
    if not chosen:
        return []
    lines = ["trajectories worth reading:"]
    for item in chosen:
        version = "" if item.version is None else f", policy version {item.version}"
        lines += [
            f"  {item.title}: score {item.score:g}{version}, {item.tokens} generated tokens",
            *(f"      {line}" for line in item.lines),
            f"      {command} {shlex.quote(item.record_id)} --run_name {run_name}",
        ]
    return [*lines, ""]


async def read_worth_reading(store: Store) -> list[WorthReading]:
    """Return the first wrong, the first right and the longest trajectory of the train split."""
    found = []
    for title, row in choose_worth_reading(await store.views.trajectories(split="train")):
        whole = await store.views.whole_trajectory(row.id)
        if whole is None or row.score is None:
            continue
        found.append(
            WorthReading(
                title, row.id, row.score, row.min_version, row.generated_tokens, excerpt_lines(whole)
            )
        )
    return found


def choose_worth_reading(rows: Sequence[TrajectoryRow]) -> list[tuple[str, TrajectoryRow]]:
    """Return up to three different trajectories with a score, each with its title."""
    scored = sorted((row for row in rows if row.score is not None), key=lambda row: (row.created_at, row.id))
    wrong = next((row for row in scored if (row.score or 0.0) <= RIGHT), None)
    right = next((row for row in scored if (row.score or 0.0) > RIGHT), None)
    others = [row for row in scored if row not in (wrong, right)]
    longest = max(others, key=lambda row: row.generated_tokens, default=None)
    named = (("first wrong", wrong), ("first right", right), ("longest", longest))
    return [(title, row) for title, row in named if row is not None]


def excerpt_lines(whole: WholeTrajectory) -> tuple[str, ...]:
    """Return the question, each model call with its tool results, and the expected answer, a line each."""
    lines = [f"question  {excerpt(whole.record.query, EXCERPT_CHARS)}"]
    for call in whole.calls:
        said = call.response.get("content") or ""
        asked = [
            f"{execution.name}({json.dumps(execution.arguments, ensure_ascii=False)}) = {execution.text}"
            for execution in call.tool_executions
        ]
        shown = " ".join([str(said), *asked]).strip() or call.error or "(no text)"
        lines.append(f"model     {excerpt(shown, EXCERPT_CHARS)}")
    if whole.record.final_answer != whole.record.answer:
        lines.append(f"expected  {excerpt(whole.record.answer, EXCERPT_CHARS)}")
    return tuple(lines)
