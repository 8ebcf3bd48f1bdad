"""Find two stored evaluations, and compare or list evaluations: ``agentrl eval compare`` and ``report``."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.load import Configs
from agentrl.config.schema import RunConfig
from agentrl.documents.run import Evaluation
from agentrl.errors import ConfigError
from agentrl.evaluation.plot import plot_evaluations
from agentrl.evaluation.report import comparison_json, markdown, render_comparison, table, to_json
from agentrl.evaluation.run import evaluated_tasks
from agentrl.scoring.evaluation import EvaluatedTask, compare_tasks
from agentrl.store.client import open_existing

if TYPE_CHECKING:
    from agentrl.store.client import Store

_SHOWN = 10


async def compare(configs: Configs, a: str, b: str, *, as_json: bool) -> None:
    """Print the paired comparison of two evaluations, named by id, version or RUN/id."""
    first, second = await _read(configs, a), await _read(configs, b)
    found = await asyncio.to_thread(compare_tasks, first[1], second[1])
    if found is None:
        raise ConfigError(
            f"{first[0].id} and {second[0].id} have no scored task with the same id and content in common",
            hint="evaluate both policies on the same --eval_file",
        )
    if as_json:
        print(json.dumps(comparison_json(first[0], second[0], found)))
    else:
        print(render_comparison(first[0], second[0], found))


async def report(configs: Configs, *, as_json: bool, as_markdown: bool, plot: str | None) -> None:
    """Print the evaluations of a run as a table, as Markdown or as JSON; plot them if ``plot`` is a file."""
    async with await open_existing(configs[RunConfig]) as store:
        evaluations = await store.evaluations.all()
        best = await store.evaluations.best_versions()
    if as_json:
        print(json.dumps([to_json(item) for item in evaluations]))
    elif as_markdown:
        print(markdown([item for item in evaluations if item.results is not None]))
    else:
        print(table(evaluations, best))
    if plot is not None:
        plot_evaluations(configs[RunConfig].run_name, evaluations, Path(plot))


async def _read(configs: Configs, named: str) -> tuple[Evaluation, list[EvaluatedTask]]:
    run_name, slash, rest = named.rpartition("/")
    run = configs[RunConfig]
    if slash:
        run = dataclasses.replace(run, run_name=run_name)
    async with await open_existing(run) as store:
        evaluation = await find(store, rest)
        return evaluation, await evaluated_tasks(store, configs, evaluation)


async def find(store: Store, named: str) -> Evaluation:
    """Return the finished evaluation that ``named`` is the id, a part of the id or the version of.

    Raises ConfigError if there is none or more than one.
    """
    finished = [item for item in await store.evaluations.all() if item.results is not None]
    number = named.removeprefix("v")
    chosen = [item for item in finished if item.id == named]
    if not chosen and number.isdigit():
        chosen = [item for item in finished if item.version == int(number)]
    chosen = chosen or [item for item in finished if named in item.id]
    if len(chosen) == 1:
        return chosen[0]
    what = "several finished evaluations" if chosen else "no finished evaluation"
    shown = ", ".join(item.id for item in (chosen or finished)[-_SHOWN:])
    raise ConfigError(
        f"run {store.run_name!r} has {what} named {named!r}",
        hint=f"give one of: {shown}" if shown else "`agentrl eval` makes one",
    )
