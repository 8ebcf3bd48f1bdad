"""Environment ``reasoning_gym``: tasks of every family of reasoning-gym, alone or mixed, with its scorers.

    agentrl tasks load 'env:reasoning_gym?families=leg_counting:2,gcd&levels=0-2&n=1000&seed=1' --run_name …

``families`` are names with optional weights (default 1), ``all`` is every family. ``levels`` are levels of
the families' own curricula, 0 is the easiest; without it a family has its default difficulty. A ``config``
is a YAML file in reasoning-gym's format for mixtures: ``datasets: [{name, weight, config: {…}}]``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.environments.base import Environment, TaskRequest, environment
from agentrl.environments.packages import require_package
from agentrl.environments.reasoning_gym_entries import Family, generate_entries, score_entry
from agentrl.errors import ScorerError, TaskFileError
from agentrl.scoring.scorers import ScorerContext, ScoreResult

NAME = "reasoning_gym"
_SYSTEM = "Solve the problem. You may think first. Give only the final result, inside <answer></answer>."


@environment(NAME)
class ReasoningGym(Environment):
    """Questions with one answer; the family's own scorer scores it."""

    options = ("families", "levels", "config")
    task_defaults = {"agent_name": "single_turn", "system_prompt": _SYSTEM}  # noqa: RUF012

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError unless reasoning-gym is installed."""
        require_package(NAME, NAME)

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterable[Mapping[str, Any]]:
        """Yield one task for each entry that a process of its own generates.

        Raises TaskFileError for a malformed option or an unknown family.
        """
        families = _families(request.options)
        levels = _levels(request.options.get("levels"))
        for entry in generate_entries(families, levels, seed=request.random_seed, count=request.n):
            stored = {name: entry[name] for name in ("family", "level", "metadata", "tuples", "config")}
            level = {} if entry["level"] is None else {"level": entry["level"]}
            meta = {**level, NAME: stored}
            yield {"query": entry["question"], "answer": entry["answer"], "meta": meta}

    @classmethod
    def score(cls, context: ScorerContext) -> ScoreResult:
        """Return the score of the family's own scorer; 0 without an answer.

        A scorer that raises for this answer, and not for the right one, gives 0 and the reason as a detail.
        """
        entry = context.meta.get(NAME)
        if not isinstance(entry, Mapping):
            raise ScorerError(
                f"the task has no meta.{NAME}", hint=f"load tasks by `agentrl tasks load env:{NAME}?…`"
            )
        details: dict[str, Any] = {"family": entry["family"], "level": entry["level"]}
        if context.final_answer is None:
            return ScoreResult(0.0, details)
        score, problem = score_entry(entry, context.query, context.answer, context.final_answer.strip())
        return ScoreResult(score, details if problem is None else {**details, "problem": problem})


def _families(options: Mapping[str, str]) -> list[Family]:
    named, path = options.get("families"), options.get("config")
    if (named is None) == (path is None):
        raise TaskFileError(
            f"env:{NAME}: give either families or config",
            hint=f"env:{NAME}?families=leg_counting:2,gcd&n=1000, or families=all",
        )
    if named is not None:
        return [_weighted(item.strip()) for item in named.split(",")]
    return _mixture(Path(str(path)))


def _weighted(text: str) -> Family:
    name, _, weight = text.partition(":")
    try:
        return Family(name, float(weight or 1))
    except ValueError as error:
        raise TaskFileError(
            f"env:{NAME}: the family {text!r} has no weight above 0", hint="write NAME:WEIGHT, such as gcd:2"
        ) from error


def _mixture(path: Path) -> list[Family]:
    """Read a mixture in reasoning-gym's own YAML format. Raises TaskFileError."""
    import yaml

    try:
        items = yaml.safe_load(path.read_text(encoding="utf-8"))["datasets"]
        found = [
            Family(str(item["name"]), float(item.get("weight", 1)), json.dumps(item.get("config") or {}))
            for item in items
        ]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise TaskFileError(
            f"the mixture {path} cannot be read: {type(error).__name__}: {error}",
            hint="write datasets: [{name: gcd, weight: 2, config: {}}]",
        ) from error
    if not found:
        raise TaskFileError(f"the mixture {path} names no family", hint="write datasets: [{name: gcd}]")
    return found


def _levels(text: str | None) -> tuple[int, ...] | None:
    """Return the levels of ``2`` or ``0-3``; None if none are given. Raises TaskFileError."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    try:
        levels = tuple(range(int(first), int(last or first) + 1))
    except ValueError:
        levels = ()
    if not levels:
        raise TaskFileError(f"env:{NAME}: levels is {text!r}", hint="write a level or a range, such as 0-3")
    return levels
