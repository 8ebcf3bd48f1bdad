"""Rank and group the trajectories that ``blame`` found, print them, and write ids, a CSV file and labels."""

from __future__ import annotations

import csv
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group

from agentrl.config.blame import BlameConfig
from agentrl.errors import ConfigError
from agentrl.evaluation.blame import Blame, Effect
from agentrl.observe.terminal import MISSING, excerpt, plain, table_of, versions
from agentrl.scoring.evaluation import Estimate, estimates

if TYPE_CHECKING:
    from agentrl.store.client import Store

KINDS: Final[dict[str, Callable[[Effect], Sequence[str]]]] = {
    "scorer": lambda item: (item.scorer or MISSING,),
    "tool": lambda item: item.tools or ("no tool",),
    "version": lambda item: (versions(item.min_version, item.max_version),),
    "task": lambda item: (item.task,),
}
"""Kind of group → the names of the groups of a trajectory. One that called two tools counts in both."""
LABELER: Final = "agentrl blame"
"""Who gives the labels of ``--label``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlamedGroup:
    """The trajectories with one scorer, tool, version or task."""

    name: str
    trajectories: int
    blamed: int
    """How many of them are among the blamed ones."""
    effect: Estimate
    """The sum of their effects, with a 95 % interval: bootstrap over tasks; of one task, over its members."""


def groups_of(blame: Blame, blamed: Sequence[Effect], limit: int) -> dict[str, list[BlamedGroup]]:
    """Return kind → its ``limit`` groups with the largest sums, the largest first."""
    chosen = {item.record for item in blamed}
    found: dict[str, list[BlamedGroup]] = {}
    for kind, names in KINDS.items():
        members: dict[str, list[Effect]] = defaultdict(list)
        for item in blame.effects:
            for name in names(item):
                members[name].append(item)
        largest = sorted(members, key=lambda name: -sum(item.effect for item in members[name]))[:limit]
        found[kind] = [
            BlamedGroup(
                name=name,
                trajectories=len(members[name]),
                blamed=sum(item.record in chosen for item in members[name]),
                effect=_sum(members[name]),
            )
            for name in largest
        ]
    return found


def _sum(items: Sequence[Effect]) -> Estimate:
    by_task: dict[str, float] = defaultdict(float)
    for item in items:
        by_task[item.task] += item.effect
    rows = list(by_task.values()) if len(by_task) > 1 else [item.effect for item in items]
    mean = estimates([rows])[0]
    assert mean is not None
    size = len(rows)
    return Estimate(value=mean.value * size, low=mean.low * size, high=mean.high * size)


def show(blame: Blame, blamed: Sequence[Effect], flags: BlameConfig, console: Console) -> None:
    """Print what changed, what it was computed from, the blamed trajectories and the groups."""
    a, b, tasks = blame.a, blame.b, blame.tasks
    before, after = (sum(getattr(task, name) for task in tasks) / len(tasks) for name in ("before", "after"))
    scaled = ", scaled by AdamW's moments" if blame.is_scaled else ", not scaled: no checkpoint is left"
    lines = [
        f"A             {a.id}, step {a.step}",
        f"B             {b.id}, step {b.step}",
        f"tasks         {len(tasks)} ({flags.changes}): mean score {before:.3f} → {after:.3f}",
        f"trajectories  {len(blame.effects):,} of steps {blame.steps[0]} to {blame.steps[-1]}"
        + (f"; {blame.missing:,} have no training data any more" if blame.missing else ""),
        f"gradients     at the weights of steps {', '.join(map(str, blame.weights))}{scaled}",
        f"change        {blame.measured:+.3f} measured, {blame.estimated:+.3f} by the trajectories together",
    ]
    rows = table_of(
        f"{len(blamed)} blamed of {len(blame.effects):,}; the first {min(len(blamed), flags.limit)}",
        blamed[: flags.limit],
        ("record", lambda item: item.record),
        ("scorer", lambda item: item.scorer or MISSING),
        ("tools", lambda item: excerpt(", ".join(item.tools) or MISSING, 30)),
        ("effect", lambda item: f"{item.effect:+.2e}"),
        ("score", lambda item: f"{item.score:g}"),
        ("advantage", lambda item: f"{item.advantage:+.2f}"),
        ("version", lambda item: versions(item.min_version, item.max_version)),
        ("step", lambda item: item.step),
        text=3,
    )
    groups = [
        table_of(
            f"by {kind}",
            members,
            (kind, lambda item: item.name),
            ("trajectories", lambda item: item.trajectories),
            ("blamed", lambda item: item.blamed),
            ("effect", lambda item: f"{item.effect.value:+.2e}"),
            ("95 % interval", lambda item: f"[{item.effect.low:+.2e}, {item.effect.high:+.2e}]"),
        )
        for kind, members in groups_of(blame, blamed, flags.limit).items()
    ]
    console.print(Group(*map(plain, lines), "", rows, *groups))


def to_json(blame: Blame, blamed: Sequence[Effect], flags: BlameConfig) -> dict[str, Any]:
    """Return everything as JSON; ``blamed`` is the number of first trajectories that are blamed."""
    return {
        "a": blame.a.id, "b": blame.b.id, "steps": blame.steps, "weights": blame.weights,
        "adam_scale": blame.is_scaled, "missing": blame.missing,
        "tasks": [dataclasses.asdict(task) | {"change": task.change} for task in blame.tasks],
        "measured": blame.measured, "estimated": blame.estimated, "blamed": len(blamed),
        "trajectories": [dataclasses.asdict(item) for item in blame.effects],
        "groups": {
            kind: [dataclasses.asdict(item) for item in members]
            for kind, members in groups_of(blame, blamed, flags.limit).items()
        },
    }  # fmt: skip


def write_files(blame: Blame, blamed: Sequence[Effect], flags: BlameConfig) -> None:
    """Write the ids to ``--out`` and the table to ``--csv``. Raises ConfigError for an unwritable file."""
    if flags.out is not None:
        with _opened("--out", flags.out) as file:
            file.writelines(f"{item.record}\n" for item in blamed)
    if flags.csv is not None:
        names = [item.name for item in dataclasses.fields(Effect)]
        with _opened("--csv", flags.csv) as file:
            rows = csv.writer(file)
            rows.writerow(names)
            for item in blame.effects:
                values = dataclasses.asdict(item) | {"tools": " ".join(item.tools)}
                rows.writerow([values[name] for name in names])


def _opened(flag: str, path: str) -> Any:
    try:
        return Path(path).open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be written: {error.strerror}", hint="give the path of a file"
        ) from error


async def put_labels(store: Store, blame: Blame, blamed: Sequence[Effect], label: str) -> None:
    """Label the blamed Records; the note holds their rank and effect."""
    for rank, item in enumerate(blamed, 1):
        change = f"{item.effect:+.2e} of the change from {blame.a.id} to {blame.b.id}"
        note = f"{rank} of {len(blame.effects)}: {change}"
        await store.labels.put(item.record, by=LABELER, label=label, note=note)
