"""The report reads logs and ``agentrl db check``, and lists violations."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.documents.status import RecordStatus, TaskStatus
from chaos.actors import Exit
from chaos.report import Report, check_run, examine

LOG = """\
08:12:01 INFO    chaos/sample-vm-1  scored  record=train/0/a/0/1 score=0.5 stop=answered turns=2
08:12:02 INFO    chaos/sample-vm-1  scored  record=train/0/a/1/2 score=0 stop=answered turns=2
08:12:03 WARNING chaos/sample-vm-1  the claim was lost; its result is dropped  record=train/0/b/0/1
"""
SOUND = "print('1. slots end: 8 slots checked, 0 violations')"
STATUSES = {RecordStatus.READY: 5, RecordStatus.ABANDONED: 2, RecordStatus.FAILED: 3}
UNSOUND = "print('invariant 2: trained twice'); print('2 violations'); raise SystemExit(1)"


class Records:
    """A collection that holds the Records of these ids."""

    def __init__(self, *ids: str) -> None:
        self._ids = ids

    async def find(self, query: dict[str, Any], _: object) -> Any:
        if "_id" not in query:
            for status, count in STATUSES.items():
                for _ in range(count):
                    yield {"status": status}
        for id in set(query.get("_id", {}).get("$in", ())) & set(self._ids):
            yield {"_id": id}


def store(*ids: str) -> Any:
    records = Records(*ids)

    async def some(*_: object) -> list[int]:
        return [1, 2, 3]

    async def counts(split: str) -> dict[TaskStatus, int]:
        return {TaskStatus.RUNNING: 4, TaskStatus.CREATED: 0}

    return SimpleNamespace(
        records=records,
        database={"Record": records},
        steps=SimpleNamespace(find=some),
        policy_versions=SimpleNamespace(all=some),
        tasks=SimpleNamespace(counts=counts),
    )


def report(*exits: Exit, finished: bool = True) -> Report:
    return Report(faults=Counter({"kill sampler": 2}), exits=exits, seconds=60.0, finished=finished)


async def examined(found: Report, logs: Path, *ids: str, check: str = SOUND, log: str = LOG) -> list[str]:
    (logs / "sampler-0.out").write_text(log, encoding="utf-8")
    await examine(store(*ids), logs, found)
    check_run([sys.executable, "-c", check], found)
    return list(found.lines())


async def test_a_sound_run(tmp_path: Path) -> None:
    lines = await examined(report(), tmp_path, "train/0/a/0/1", "train/0/a/1/2")
    assert lines[0] == "1. slots end: 8 slots checked, 0 violations"
    assert lines[-1] == "0 violations"
    figures = {line[:46].strip(): int(line[46:]) for line in lines[2:-1]}
    assert figures["kill sampler"] == 2
    assert figures["late results refused"] == 1
    assert figures["trajectories scored"] == 7
    assert figures["scores acknowledged to a sampler"] == 2
    assert figures["steps trained"] == 3


async def test_an_acknowledged_score_that_is_not_there_is_a_violation(tmp_path: Path) -> None:
    lines = await examined(report(), tmp_path, "train/0/a/0/1")
    assert lines[-2:] == ["violation: train/0/a/1/2 was acknowledged and is lost", "1 violations"]


@pytest.mark.parametrize(
    ("found", "log", "told"),
    [
        (report(Exit("trainer", 1, "boom")), "", "trainer ended by itself with exit code 1"),
        (report(finished=False), "", "did not end in time; tasks: {'running': 4}"),
        (report(), "Traceback (most recent call last):\n", "sampler-0.out contains a traceback"),
    ],
)
async def test_what_should_not_happen_is_a_violation(
    found: Report, log: str, told: str, tmp_path: Path
) -> None:
    lines = await examined(found, tmp_path, log=log)
    assert any(told in line for line in lines)
    assert lines[-1] == "1 violations"


async def test_every_violation_of_the_check_counts(tmp_path: Path) -> None:
    lines = await examined(report(), tmp_path, check=UNSOUND, log="")
    assert "violation: agentrl db check: invariant 2: trained twice" in lines
    assert lines[-1] == "2 violations"


async def test_a_check_that_does_not_run_is_a_violation(tmp_path: Path) -> None:
    lines = await examined(report(), tmp_path, check="raise SystemExit('no such command')", log="")
    assert any("did not run (exit code 1): no such command" in line for line in lines)
    assert lines[-1] == "1 violations"
