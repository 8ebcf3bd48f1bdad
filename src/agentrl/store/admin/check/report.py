"""The result of a check: the invariants, the violations found, and the printed report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Self

from agentrl.documents.base import shortened


class Invariant(IntEnum):
    """A property that every run has, at every moment and at its end."""

    title: str
    """The invariant in one sentence."""

    TRAJECTORIES = 1, "slots end with one live Record, and no model call is missing"
    TRAINING = 2, "every token is trained by the steps that say so, and no more often than allowed"
    GROUPS = 3, "groups say what their Records say, and every score is a scorer's"
    STATES = 4, "states are legal, and no lease outlives its owner"
    VERSIONS = 5, "policy versions are whole, and tokens name those that were published"
    EPOCHS = 6, "every epoch holds every task of the file once"
    CONTENTS = 7, "tasks, calls, answers, scores and metrics are as they were written"
    FAMILY = 8, "a run and its parent name each other, and what the child needs is kept"
    RETRACTED = 9, "nothing but its tombstone is left of what was withdrawn"

    def __new__(cls, value: int, title: str = "") -> Self:
        invariant = int.__new__(cls, value)
        invariant._value_, invariant.title = value, title
        return invariant


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with one document."""

    document: str
    """Collection and ``_id``, as in ``Record train/0/task_001/3/1``."""
    what: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.document}: {self.what}: expected {_shown(self.expected)}, found {_shown(self.found)}"


@dataclass(frozen=True, slots=True)
class Violation:
    """A problem that breaks an invariant. ``key`` is the ``_id`` of the document to check again."""

    invariant: Invariant
    problem: Problem
    key: Any

    def same_as(self) -> tuple[Any, ...]:
        """Return the identity of the violation; its values may change between two checks."""
        return self.invariant, self.problem.document, self.problem.what


class Findings:
    """Collects counts of checked things, violations and notes."""

    def __init__(self) -> None:
        self.checked: dict[Invariant, Counter[str]] = {invariant: Counter() for invariant in Invariant}
        self.violations: list[Violation] = []
        self.notes: list[str] = []

    def count(self, invariant: Invariant, things: str, number: int = 1) -> None:
        """Count ``number`` more ``things`` as checked against the invariant."""
        self.checked[invariant][things] += number

    def add(self, invariant: Invariant, key: Any, problems: Iterable[Problem]) -> None:
        """Add the problems of one document."""
        self.violations.extend(Violation(invariant, problem, key) for problem in problems)

    def wrong(
        self, invariant: Invariant, key: Any, document: str, what: str, expected: Any, found: Any
    ) -> None:
        """Add one problem of a document."""
        self.add(invariant, key, [Problem(document, what, expected, found)])

    def note(self, text: str) -> None:
        """Note what could not be checked; each text is kept once."""
        if text not in self.notes:
            self.notes.append(text)

    def merge(self, other: Findings) -> None:
        """Add the counts, violations and notes of ``other``."""
        for invariant, counts in other.checked.items():
            self.checked[invariant].update(counts)
        self.violations += other.violations
        for text in other.notes:
            self.note(text)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check."""

    checked: Mapping[Invariant, Mapping[str, int]]
    violations: tuple[Violation, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def of(self, invariant: Invariant) -> list[Violation]:
        """Return the violations of one invariant."""
        return [violation for violation in self.violations if violation.invariant is invariant]

    def to_json(self) -> dict[str, Any]:
        """Return the invariants with the numbers of checked things, the violations and the notes."""
        return {
            "invariants": [
                {
                    "number": invariant.value, "title": invariant.title,
                    "checked": dict(self.checked[invariant]), "violations": len(self.of(invariant)),
                }
                for invariant in Invariant
            ],
            "violations": [
                {"invariant": violation.invariant.value, "problem": str(violation.problem)}
                for violation in self.violations
            ],
            "notes": list(self.notes),
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield a line per invariant, then each violation and note, then the number of violations."""
        for invariant in Invariant:
            things = ", ".join(f"{number:,} {name}" for name, number in self.checked[invariant].items())
            yield (
                f"{invariant.value}. {invariant.title}: {things or 'nothing'} checked,"
                f" {_violations(len(self.of(invariant)))}"
            )
        for invariant in Invariant:
            for violation in self.of(invariant):
                yield f"invariant {invariant.value}: {violation.problem}"
        for note in self.notes:
            yield f"note: {note}"
        yield _violations(len(self.violations))


def _violations(number: int) -> str:
    return f"{number:,} violation{'' if number == 1 else 's'}"


def _shown(value: Any) -> str:
    return shortened(value if isinstance(value, str) else repr(value), 200)
