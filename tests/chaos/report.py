"""Report a chaos run: faults, counts, and violations."""

from __future__ import annotations

import re
import subprocess
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ready_data import statuses

from agentrl.documents.status import RecordStatus
from chaos.actors import Exit

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from chaos.journal import CallWatcher, Notes

_ACKNOWLEDGED = re.compile(r"  scored  record=(\S+) score=")
_TRACEBACK = re.compile(r"^(\s*)Traceback \(most recent call last\)")
_SEEN = {
    "late results refused": re.compile(r"the claim was lost"),
    "publications refused by a full disk": re.compile(r"the disk of .* is full"),
    "damaged versions refused by an engine": re.compile(r"version \d+ refused"),
    "superseded trainers refused": re.compile(r"this trainer .* has been replaced"),
    "outages waited for": re.compile(r"the database is unavailable"),
}
_KEPT = (RecordStatus.SCORED, RecordStatus.READY, RecordStatus.ABANDONED)
_CHECK_SECONDS = 600.0
_PAGE = 500
_SHOWN = 20


def row(name: str, value: float) -> str:
    """Return the line of one figure."""
    return f"{name:<46} {value:>6.0f}"


@dataclass(kw_only=True)
class Findings(ABC):
    """What came of a run, and its ``violations``, one line each; a correct run has none."""

    violations: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the lines of the report; the last one is ``N violations``."""
        shown = [f"violation: {line}" for line in self.violations[:_SHOWN]]
        if len(self.violations) > _SHOWN:
            shown.append(f"  … and {len(self.violations) - _SHOWN} more")
        return [*self.figures(), *shown, f"{len(self.violations)} violations"]

    @abstractmethod
    def figures(self) -> Iterable[str]:
        """Yield the lines before the violations."""


@dataclass(kw_only=True)
class Report(Findings):
    """The counts of one chaos run."""

    faults: Counter[str]
    exits: Sequence[Exit]
    seconds: float
    finished: bool
    scored: int = 0
    steps: int = 0
    versions: int = 0
    acknowledged: int = 0
    continued: int = 0
    """How often a trajectory was continued by another owner."""
    replayed: int = 0
    """Turns that these had from the journal."""
    outside_calls: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    checks: list[str] = field(default_factory=list)
    """The output of each ``agentrl db check``."""

    def figures(self) -> Iterator[str]:
        """Yield what was checked, and the counts."""
        for check in self.checks:
            yield from (line for line in check.splitlines() if line[:1].isdigit() and "checked" in line)
            yield ""
        yield row("faults", sum(self.faults.values()))
        for name, count in sorted(self.faults.items()):
            yield row(f"  {name}", count)
        for name in _SEEN:
            yield row(name, self.seen[name])
        yield row("trajectories scored", self.scored)
        yield row("scores acknowledged to a sampler", self.acknowledged)
        yield row("trajectories continued by another owner", self.continued)
        yield row("  turns replayed", self.replayed)
        yield row("calls of a tool with outside effects", self.outside_calls)
        yield row("steps trained", self.steps)
        yield row("policy versions", self.versions)
        yield row("seconds of faults", self.seconds)


async def examine(store: Store, logs: Path, report: Report) -> None:
    """Add the counts from the database and the logs to the report, and violations.

    A violation is an acknowledged score that is missing in the database, a process that ended by itself, a
    traceback in a log, or a run that did not complete. ``check_run`` adds more.
    """
    records = await statuses(store, "Record")
    report.scored = sum(records[status] for status in _KEPT)
    report.steps = len(await store.steps.find())
    report.versions = len(await store.policy_versions.all())
    acknowledged = _read_logs(logs, report)
    report.acknowledged = len(acknowledged)
    report.violations += [
        f"{exit.actor} ended by itself with exit code {exit.code}:\n{exit.last_lines}"
        for exit in report.exits
    ]
    report.violations += [f"{key} was acknowledged and is lost" for key in await _lost(store, acknowledged)]
    if not report.finished:
        left = {str(status): count for status, count in (await store.tasks.counts("train")).items() if count}
        report.violations.append(f"samplers and trainer did not end in time; tasks: {left}")


async def examine_journals(store: Store, notes: Notes, calls: CallWatcher, report: Report) -> None:
    """Add what the journals, the log of the tool and the watched model calls say.

    A violation is an outside call that was made twice or not by the trajectory that stores its result, a
    stored turn that has changed, and a trajectory that diverged: its agent does the same each time.
    """
    report.outside_calls = notes.calls
    report.violations += notes.repeated()
    async for call in store.database["DispatchedSamplingTask"].find(
        {}, {"record": 1, "index": 1, "tool_executions": 1}
    ):
        report.violations += notes.invented(call)
    await calls.finish()
    report.violations += calls.violations
    async for record in store.database["Record"].find({"owners.1": {"$exists": True}}, {"owners": 1}):
        later = record["owners"][1:]
        report.continued += len(later)
        report.replayed += sum(owner["replayed"] for owner in later)
        report.violations += [
            f"{record['_id']} diverged at turn {owner['diverged_at']} for {owner['owner']}"
            for owner in later
            if owner.get("diverged_at") is not None
        ]


async def _lost(store: Store, acknowledged: Sequence[str]) -> list[str]:
    lost: list[str] = []
    kept = [status.value for status in _KEPT]
    for start in range(0, len(acknowledged), _PAGE):
        page = acknowledged[start : start + _PAGE]
        query = {"_id": {"$in": page}, "status": {"$in": kept}, "score": {"$ne": None}}
        there = {document["_id"] async for document in store.database["Record"].find(query, {"_id": 1})}
        lost += [key for key in page if key not in there]
    return lost


def _read_logs(logs: Path, report: Report) -> list[str]:
    """Return the ids of Records with an acknowledged score; add counts and tracebacks to the report."""
    acknowledged: dict[str, None] = {}
    for log in sorted(logs.glob("*.out")):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if found := _ACKNOWLEDGED.search(line):
                acknowledged[found[1]] = None
            if _TRACEBACK.match(line):
                report.violations.append(f"{log.name} contains a traceback")
            report.seen.update(name for name, pattern in _SEEN.items() if pattern.search(line))
    return list(acknowledged)


def check_run(command: Sequence[str], report: Report) -> None:
    """Run ``agentrl db check`` and add its violations to the report."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False)
    report.checks.append(done.stdout)
    if done.returncode == 0:
        return
    counted = re.findall(r"(\d+) violations?", done.stdout)
    if not counted:
        report.violations.append(
            f"agentrl db check did not run (exit code {done.returncode}): {done.stderr[-500:]}"
        )
        return
    found = [line for line in done.stdout.splitlines() if line.startswith("invariant ")]
    more = [f"violation no. {number}" for number in range(len(found) + 1, int(counted[-1]) + 1)]
    report.violations += [f"agentrl db check: {line}" for line in (*found, *more)]
