"""Environment ``reasoning_gym``: tasks of every family of reasoning-gym, alone or mixed, with its scorers.

    agentrl tasks load 'env:reasoning_gym?families=leg_counting:2,gcd&levels=0-2&n=1000&seed=1' --run_name …

``families`` are names with optional weights (default 1), ``all`` is every family. ``levels`` are levels of
the families' own curricula, 0 is the easiest; without it a family has its default difficulty. A ``config``
is a YAML file in reasoning-gym's format for mixtures: ``datasets: [{name, weight, config: {…}}]``.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from agentrl.environments.environment import (
    Environment,
    TaskRequest,
    environment,
    import_package,
    require_package,
)
from agentrl.errors import ScorerError, TaskFileError
from agentrl.scoring.scorers import ScorerContext, ScoreResult

NAME = "reasoning_gym"
_SYSTEM = "Solve the problem. You may think first. Give only the final result, inside <answer></answer>."
_CHUNK = 1000
"""Entries of one dataset object. Some families depend on its size, so it must not depend on ``count``."""
_START_SECONDS, _ENTRY_SECONDS = 120.0, 5.0
"""Time limit of generation: for the start of the process, and for each entry."""
_ERROR_CHARS, _REASON_CHARS = 8000, 200
_SHOWN = 5
"""Families that failed whose reasons are shown."""


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
        families = [
            Family(str(item["name"]), float(item.get("weight", 1)), json.dumps(item.get("config") or {}))
            for item in items
        ]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise TaskFileError(
            f"the mixture {path} cannot be read: {type(error).__name__}: {error}",
            hint="write datasets: [{name: gcd, weight: 2, config: {}}]",
        ) from error
    if not families:
        raise TaskFileError(f"the mixture {path} names no family", hint="write datasets: [{name: gcd}]")
    return families


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


@dataclass(frozen=True, slots=True)
class Family:
    """One family of a mixture; ``config`` is JSON text with parameters of the family's dataset."""

    name: str
    weight: float = 1.0
    config: str = "{}"

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"the weight is {self.weight}")


def generate_entries(
    families: Sequence[Family], levels: Sequence[int] | None, *, seed: str, count: int
) -> Iterator[dict[str, Any]]:
    """Yield ``count`` entries: ``{family, level, config, question, answer, metadata, tuples}``.

    They are generated by a process with a fixed hash seed, because some families iterate over sets. Raises
    TaskFileError with the reason if it fails.
    """
    request = {
        "families": [asdict(family) for family in families], "levels": levels, "seed": seed, "count": count,
    }  # fmt: skip
    limit = _START_SECONDS + _ENTRY_SECONDS * count
    with tempfile.TemporaryFile() as out:
        try:
            done = subprocess.run(
                [sys.executable, "-m", __spec__.name], input=json.dumps(request).encode(), stdout=out,
                stderr=subprocess.PIPE, timeout=limit, check=False,
                env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"},
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise TaskFileError(
                f"env:{NAME}: generating {count} tasks took longer than {limit:g} s",
                hint="ask for fewer, or leave out slow families such as knight_swap",
            ) from error
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace")[-_ERROR_CHARS:].strip()
            raise TaskFileError(f"env:{NAME}: {said.rpartition('TaskFileError: ')[2] or done.returncode}")
        out.seek(0)
        for line in out:
            yield json.loads(line)


def score_entry(
    entry: Mapping[str, Any], question: str, right: str | None, answer: str
) -> tuple[float, str | None]:
    """Return the score of ``answer`` by the family's scorer, and why the scorer could not read the answer.

    Raises ScorerError if the scorer cannot score the right answer either, or would run what the task holds as
    a program, ConfigError without the package.
    """
    dataset = _dataset(entry["family"], entry["level"], entry["config"], 0)
    if _evaluates(dataset.__class__):
        own = (right, *(entry["metadata"].get(name) for name in _EVALUATED))
        if not all(_is_harmless(text) for text in own if isinstance(text, str)):
            raise ScorerError(f"family {entry['family']} would run what the task holds as a program")
        if not _is_harmless(answer):
            return 0.0, "the family's scorer would run the answer as a program"
    metadata = _tuples(entry["metadata"]) if entry["tuples"] else entry["metadata"]
    whole = {"question": question, "answer": right, "metadata": metadata}
    try:
        return float(dataset.score_answer(answer, whole)), None
    except Exception as error:  # noqa: BLE001  another package's code, on text of the model
        reason = f"{type(error).__name__}: {error}"
    try:
        if right is not None:
            dataset.score_answer(right, whole)
    except Exception as error:
        raise ScorerError(
            f"the scorer of family {entry['family']} raised {type(error).__name__}: {error}",
            hint="reasoning-gym may have changed since the tasks were loaded",
        ) from error
    return 0.0, f"the family's scorer cannot read the answer: {reason}"


_EVALUATION = re.compile(r"(?<![\w.])(?:eval|exec)\(|\b(?:parse_expr|sympify)\(")
_EVALUATED = ("problem", "integrand")
"""Metadata that families evaluate."""
_NAMES = re.compile(r"(?<!\w)[^\W\d]\w+")
_FUNCTIONS = frozenset({
    "sqrt", "exp", "log", "ln", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh",
    "cosh", "tanh", "arcsin", "arccos", "arctan", "pi", "abs", "Abs", "Integral",
})  # fmt: skip


@cache
def _evaluates(dataset: type) -> bool:
    """Return whether a family's scorer evaluates text as Python: a dozen of reasoning-gym 0.1 do."""
    scorer, module = dataset.score_answer, sys.modules[dataset.__module__]  # type: ignore[attr-defined]
    used = (getattr(module, name, None) for name in scorer.__code__.co_names)
    functions = (scorer, *filter(inspect.isfunction, used))
    return any(_EVALUATION.search(inspect.getsource(each)) for each in functions)


def _is_harmless(text: str) -> bool:
    """Return whether evaluating ``text`` as Python calls nothing but mathematical functions."""
    if "(" not in text:
        return True
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        ast.literal_eval(text.strip())
        return True
    return _FUNCTIONS.issuperset(_NAMES.findall(text)) and not re.search(r"[\"'\\]|\.\s*[^\W\d]", text)


def main() -> None:
    """Generate the entries that standard input asks for, one line of JSON each."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # some families print
    request = json.load(sys.stdin)
    families = _expanded([Family(**item) for item in request["families"]])
    levels, failed = request["levels"] or [None], dict[str, str]()
    for index in range(request["count"]):
        choice = random.Random(f"{request['seed']}/{index}")
        (family,) = choice.choices(families, [item.weight for item in families])
        level = choice.choice(levels)
        try:
            print(json.dumps(_entry(family, level, request["seed"], index)), file=out)
        except TaskFileError as error:
            failed.setdefault(family.name, error.message[:_REASON_CHARS])
    out.close()
    if failed:
        more = f"\n  … and {len(failed) - _SHOWN} more families" if len(failed) > _SHOWN else ""
        raise TaskFileError(
            "\n  ".join(list(failed.values())[:_SHOWN]) + more,
            hint="leave them out (families=all,-" + ",-".join(failed) + "), or ask for other levels",
        )


def _expanded(families: Sequence[Family]) -> list[Family]:
    """Return the families with ``all`` replaced by every one, without those named ``-NAME``.

    Raises TaskFileError for an unknown one, and if none is left.
    """
    factory = import_package("reasoning_gym.factory", NAME)
    import_package(NAME, NAME)
    known = sorted(name for name in factory.DATASETS if name != "composite")
    for family in families:
        if (name := family.name.removeprefix("-")) not in (*known, "all"):
            nearest = difflib.get_close_matches(name, known, n=1)
            raise TaskFileError(
                f"reasoning-gym has no family {name!r}"
                + (f"; did you mean {nearest[0]!r}?" if nearest else f"; it has {', '.join(known)}")
            )
    left_out = {family.name[1:] for family in families if family.name.startswith("-")}
    left_out |= set(known) if "all" in left_out else set()
    left = [
        Family(name, family.weight, family.config)
        for family in families
        for name in (known if family.name == "all" else [family.name])
        if name not in left_out and not name.startswith("-")
    ]
    if not left:
        raise TaskFileError("families leaves every family out", hint="name one, or all before -NAME")
    return left


def _entry(family: Family, level: int | None, seed: str, index: int) -> dict[str, Any]:
    chunk, position = divmod(index, _CHUNK)
    digest = hashlib.sha256(f"{seed}/{family.name}/{level}/{family.config}/{chunk}".encode()).digest()
    config = json.loads(family.config)
    try:
        dataset = _dataset(family.name, level, family.config, int.from_bytes(digest[:4], "big") >> 1)
        entry = dataset[position]
        text = json.dumps(entry["metadata"])
        stored = {"question": entry["question"], "answer": entry["answer"], "metadata": json.loads(text)}
        right = entry["answer"]
        tuples = right is not None and dataset.score_answer(right, stored) != dataset.score_answer(
            right, entry
        )
    except Exception as error:
        raise TaskFileError(
            f"family {family.name} (level {level}, config {config}) raised {type(error).__name__}: {error}"
        ) from error
    return {**stored, "family": family.name, "level": level, "config": family.config, "tuples": tuples}


@lru_cache(maxsize=256)
def _dataset(name: str, level: int | None, config: str, seed: int) -> Any:
    """Return a dataset of a family: its default, or a level of its curriculum, changed by ``config``."""
    import_package(NAME, NAME)
    factory = import_package("reasoning_gym.factory", NAME)
    dataset_class, config_class = factory.DATASETS[name]
    given = {**json.loads(config), "seed": seed, "size": _CHUNK}
    if level is None or not factory.has_curriculum(name):
        return dataset_class(config=config_class(**given))
    curriculum = factory.create_curriculum(name)
    curriculum.set_global_level(level)
    return dataset_class(config=curriculum.generate_configuration(given))


def _tuples(value: Any) -> Any:
    """Return ``value`` with tuples instead of lists, which some scorers compare with."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
