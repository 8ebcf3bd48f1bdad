"""Sample an evaluation file at one policy version; report mean score, pass rate and pass@k."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from agentrl.config.load import Configs
from agentrl.config.sampling import RIGHT_THRESHOLD
from agentrl.config.schema import (
    AgentConfig,
    EngineConfig,
    GroupConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
)
from agentrl.errors import EngineError
from agentrl.rollout.finalizer import GroupFinalizer
from agentrl.rollout.load_tasks import load_tasks
from agentrl.rollout.preflight import probe
from agentrl.rollout.sampler import Sampler
from agentrl.rollout.setup import (
    collect_garbage_less_often,
    live_engines,
    open_worker,
    require_extensions,
    sampler_config,
    stop_on_signals,
)
from agentrl.store.client import Store, open_store
from agentrl.store.retry import retry_outages

_POLL_SECONDS = 1.0


async def evaluate(configs: Configs, *, version: int | None = None, label: str = "") -> int:
    """Sample ``--eval_file`` and print the table of scores. Returns 0, or 130 if a signal stopped it.

    ``version`` None: the newest version that an engine serves. ``label`` names a repetition.
    """
    run, tasks = configs[RunConfig], configs[TaskConfig]
    stop = stop_on_signals()
    with retry_outages(run.db_wait_seconds, stop):
        require_extensions(configs)
        async with await open_store(run) as store:
            version = await served_version(store, configs, version)
            split = split_name(version, label)
            await load_tasks(
                store, run, tasks, str(tasks.eval_file), split=split, num_generations=tasks.num_generations
            )
            rules = await evaluation_rules(store, configs)
            async with open_worker(store, configs, version=version, stop=stop) as (worker, _):
                collect_garbage_less_often()
                await probe(store, worker.tools, configs[SamplingConfig], split)
                finalizer = GroupFinalizer(store, rules, split=split, seed=run.seed)
                sampler = Sampler(
                    store, worker, finalizer, sampler_config(configs, split, epochs=1), _no_limit
                )
                await sampler.run(stop)
            agent_name = configs[AgentConfig].agent_name
            evaluated = await collect(store, split, agent_name, rules.right_threshold)
    console = Console()
    console.print(report_table(f"{run.run_name}: {tasks.eval_file} at policy version {version}", evaluated))
    for line in failure_lines(evaluated):
        console.print(f"failed attempts  {line}")
    return 130 if stop.is_set() else 0


def split_name(version: int, label: str) -> str:
    """Return the split of one evaluation: ``eval-v000007``, or ``eval-v000007-LABEL``."""
    return f"eval-v{version:06d}" + (f"-{label}" if label else "")


async def evaluation_rules(store: Store, configs: Configs) -> GroupConfig:
    """Return the group flags, with the run's ``right_threshold`` where none is given."""
    rules = configs[GroupConfig]
    settings = {item.id: item.values for item in await store.settings.all()}
    threshold = settings.get("groups", {}).get("right_threshold")
    if threshold is None or "right_threshold" in configs.given:
        return rules
    return replace(rules, right_threshold=float(threshold))


async def collect(
    store: Store, split: str, default_agent: str, right_threshold: float = RIGHT_THRESHOLD
) -> list[EvaluatedTask]:
    """Return the scores of every task of a split, in order. Scores above ``right_threshold`` pass."""
    evaluated = []
    for task in await store.tasks.find(split):
        records = await store.records.by_task(task.id)
        scored = [record for record in records if record.score is not None]
        kinds = [record.failure.kind for record in records if record.failure is not None]
        evaluated.append(
            EvaluatedTask(
                scorer=task.scorer,
                agent=task.agent_name or default_agent,
                scores=tuple(record.score for record in scored if record.score is not None),
                failed=len(task.slots) - len(scored),
                failures=tuple(kinds),
                turns=tuple(record.turns for record in scored),
                right_threshold=right_threshold,
            )
        )
    return evaluated


async def served_version(store: Store, configs: Configs, wanted: int | None) -> int:
    """Wait until a live engine serves ``wanted`` (None: any version), and return the newest such version.

    Raises EngineError after ``--engine_wait_seconds``.
    """
    limit = configs[SamplingConfig].engine_wait_seconds
    try:
        async with asyncio.timeout(limit):
            while True:
                services = await live_engines(store, configs[EngineConfig])
                served = {item.policy_version for item in services if item.policy_version is not None}
                if wanted in served or (wanted is None and served):
                    return max(served) if wanted is None else wanted
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        what = "any policy version" if wanted is None else f"policy version {wanted}"
        raise EngineError(
            f"no live engine serves {what} after {limit:g} s",
            hint="start one: agentrl serve --run_name … --model_name_or_path …",
        ) from error


async def _no_limit() -> None:
    """Set no limit: an evaluation may begin any number of groups."""
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedTask:
    """The scores of one task's trajectories; ``failed`` trajectories have none."""

    scorer: str
    agent: str
    scores: tuple[float, ...]
    failed: int = 0
    failures: tuple[str, ...] = ()
    """Kind of each failed attempt."""
    turns: tuple[int, ...] = ()
    right_threshold: float = RIGHT_THRESHOLD
    """A trajectory passes when its score is above this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One row of the table. Means are over tasks, which all count the same; None if nothing was scored."""

    tasks: int
    scored: int
    failed: int
    mean_score: float | None
    pass_rate: float | None
    pass_at: Mapping[int, float] = field(default_factory=dict)
    mean_turns: float | None = None


def summarize_tasks(tasks: Sequence[EvaluatedTask]) -> Summary:
    """Return the row of some tasks. No mean counts a failed trajectory."""
    scored = [task for task in tasks if task.scores]
    turns = [turn for task in scored for turn in task.turns]
    sizes = [len(task.scores) for task in scored]
    return Summary(
        tasks=len(tasks),
        scored=sum(sizes),
        failed=sum(task.failed for task in tasks),
        mean_score=_mean(statistics.fmean(task.scores) for task in scored),
        pass_rate=_mean(_passes(task) / len(task.scores) for task in scored),
        pass_at={
            k: statistics.fmean(pass_at_k(len(t.scores), _passes(t), k) for t in scored)
            for k in _powers(min(sizes, default=0))
        },
        mean_turns=_mean(float(turn) for turn in turns),
    )


def pass_at_k(samples: int, passes: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from ``passes`` of ``samples`` (arXiv 2107.03374)."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    return 1.0 - math.comb(samples - passes, k) / math.comb(samples, k)


def report_table(title: str, tasks: Sequence[EvaluatedTask]) -> Table:
    """Return a table with a row for each (scorer, agent) and one for all tasks."""
    groups: dict[tuple[str, str], list[EvaluatedTask]] = defaultdict(list)
    for task in tasks:
        groups[task.scorer, task.agent].append(task)
    whole = summarize_tasks(tasks)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for column in ("scorer", "agent"):
        table.add_column(column)
    for column in ("tasks", "scored", "failed", "score", "pass", "turns"):
        table.add_column(column, justify="right")
    for k in whole.pass_at:
        table.add_column(f"pass@{k}", justify="right")
    for (scorer, agent), members in sorted(groups.items()):
        table.add_row(scorer, agent, *_cells(summarize_tasks(members), whole.pass_at))
    if len(groups) > 1:
        table.add_section()
        table.add_row("all", "", *_cells(whole, whole.pass_at))
    return table


def failure_lines(tasks: Sequence[EvaluatedTask]) -> list[str]:
    """Return ``kind: count`` of failures, the most common first."""
    kinds = Counter(kind for task in tasks for kind in task.failures)
    return [f"{kind}: {count}" for kind, count in kinds.most_common()]


def _cells(row: Summary, columns: Iterable[int]) -> list[str]:
    numbers = [row.mean_score, row.pass_rate]
    cells = [str(row.tasks), str(row.scored), str(row.failed), *(_number(value) for value in numbers)]
    cells.append("-" if row.mean_turns is None else f"{row.mean_turns:.1f}")
    return cells + [_number(row.pass_at.get(k)) for k in columns]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _passes(task: EvaluatedTask) -> int:
    return sum(score > task.right_threshold for score in task.scores)


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.fmean(known) if known else None


def _powers(limit: int) -> list[int]:
    """Return 1, 2, 4, … up to ``limit``, and ``limit`` itself."""
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
    return sorted({*powers, limit}) if limit else []
