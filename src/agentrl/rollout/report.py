"""Scores of an evaluation → its table: mean score, pass rate and pass@k, by scorer and agent."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentrl.config.sampling import RIGHT_THRESHOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedTask:
    """The scores of one task's trajectories; ``failed`` of them brought none."""

    scorer: str
    agent: str
    scores: tuple[float, ...]
    failed: int = 0
    failures: tuple[str, ...] = ()
    """Kinds of the failures, one a failed attempt."""
    turns: tuple[int, ...] = ()
    right_threshold: float = RIGHT_THRESHOLD
    """A trajectory passes when its score is above this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One row: means over tasks, so that every task counts alike. None where nothing was scored."""

    tasks: int
    scored: int
    failed: int
    mean_score: float | None
    pass_rate: float | None
    pass_at: Mapping[int, float] = field(default_factory=dict)
    mean_turns: float | None = None


def summary_of(tasks: Sequence[EvaluatedTask]) -> Summary:
    """The row of some tasks; a trajectory that failed is in no mean."""
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
    """Unbiased chance that one of k samples passes, from ``passes`` of ``samples`` (arXiv 2107.03374)."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    return 1.0 - math.comb(samples - passes, k) / math.comb(samples, k)


def report_table(title: str, tasks: Sequence[EvaluatedTask]) -> Table:
    """A row for each (scorer, agent), and one for all."""
    groups: dict[tuple[str, str], list[EvaluatedTask]] = defaultdict(list)
    for task in tasks:
        groups[task.scorer, task.agent].append(task)
    whole = summary_of(tasks)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for column in ("scorer", "agent"):
        table.add_column(column)
    for column in ("tasks", "scored", "failed", "score", "pass", "turns"):
        table.add_column(column, justify="right")
    for k in whole.pass_at:
        table.add_column(f"pass@{k}", justify="right")
    for (scorer, agent), members in sorted(groups.items()):
        table.add_row(scorer, agent, *_cells(summary_of(members), whole.pass_at))
    if len(groups) > 1:
        table.add_section()
        table.add_row("all", "", *_cells(whole, whole.pass_at))
    return table


def failure_lines(tasks: Sequence[EvaluatedTask]) -> list[str]:
    """``kind: count``, the commonest first."""
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
    """1, 2, 4, … up to ``limit``, and ``limit`` itself."""
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
    return sorted({*powers, limit}) if limit else []
