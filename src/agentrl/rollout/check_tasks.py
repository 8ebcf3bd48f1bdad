"""Report on the tasks of a source before they are loaded: what is in them, and what would stop a load.

Memory holds hashes and lengths of the tasks; the tasks themselves are read again where an example is shown.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from agentrl.config.schema import TaskConfig
from agentrl.documents.task import Task, scorer_weights
from agentrl.documents.task_file import ReadResult
from agentrl.documents.task_messages import kind_of
from agentrl.documents.task_source import Item
from agentrl.rollout.load_tasks import read_source
from agentrl.scoring.scorable import unchecked

EXAMPLES: Final = 5
_FIELDS = 200
"""Columns of a source that are counted."""
_COUNTED = 10_000
"""Tasks whose tokens are counted."""
_NAMES = ("scorer", "answer_schema", "agent_name", "environment")
_MARKS = re.compile(r"[.,;:!?\"'’“”()\[\]]+")


@dataclass(slots=True)
class CheckedTasks:
    """What is counted while the tasks of a source are read, and the tasks, in the source's order."""

    result: ReadResult = field(default_factory=lambda: ReadResult((), ()))
    fields: dict[str, Counter[str]] = field(default_factory=dict)
    """Column → kind of value → rows."""
    names: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in _NAMES})
    exact: array[int] = field(default_factory=lambda: array("Q"))
    near: array[int] = field(default_factory=lambda: array("Q"))
    characters: array[int] = field(default_factory=lambda: array("Q"))
    images: int = 0

    def look(self, task: Task, item: Item) -> None:
        """Count one task."""
        for name, value in item.value.items() if isinstance(item.value, dict) else ():
            if name in self.fields or len(self.fields) < _FIELDS:
                self.fields.setdefault(name, Counter())[kind_of(value)] += 1
        for name, counted in self.names.items():
            value = getattr(task, name)
            if value is not None:
                counted.update([*scorer_weights(value)] if name == "scorer" else [value])
        decides = "".join(image.sha256 for image in task.images) + json.dumps(task.messages)
        if task.environment is not None:
            decides += json.dumps([task.environment, task.meta], sort_keys=True)
        self.exact.append(_hash(task.query + decides))
        self.near.append(_hash(normalized_query(task.query) + decides))
        self.characters.append(len(task.query) + sum(len(str(item.get("content"))) for item in task.messages))
        self.images += len(task.images)


def normalized_query(text: str) -> str:
    """Return a question in lower case and NFKC, with single spaces and without punctuation of sentences."""
    return " ".join(_MARKS.sub(" ", unicodedata.normalize("NFKC", text).casefold()).split())


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


async def read_checked(source: str, split: str, flags: TaskConfig) -> CheckedTasks:
    """Read and count the tasks of ``source``; bad rows are in ``result.skipped``. Raises TaskFileError."""
    checked = CheckedTasks()
    flags = replace(flags, shuffle_tasks=False, skip_bad_lines=True)
    checked.result = await read_source(source, flags, split=split, look=checked.look)
    return checked


def report(
    source: str, checked: CheckedTasks, count_tokens: Callable[[Sequence[str]], list[int]] | None
) -> dict[str, Any]:
    """Return what ``agentrl tasks check`` says about one source, as JSON values.

    ``count_tokens`` returns the number of tokens of each text; it gets at most 10,000 questions.
    """
    result, tasks = checked.result, checked.result.tasks
    total = len(tasks) + len(result.skipped)
    sizes = {"characters": _sizes(checked.characters, range(len(tasks)), tasks)}
    if count_tokens is not None:
        chosen = range(0, len(tasks), max(1, -(-len(tasks) // _COUNTED)))
        counts = count_tokens([tasks[index].query for index in chosen])
        sizes["tokens"] = {"tasks": len(chosen), **_sizes(counts, chosen, tasks)}
    return {
        "source": source,
        "rows": total,
        "tasks": len(tasks),
        "bad": list(result.skipped),
        "presets": result.presets,
        "reading": result.reading,
        "fields": [
            {"name": name, "kinds": dict(kinds), "filled": (sum(kinds.values()) - kinds["null"]) / total}
            for name, kinds in checked.fields.items()
        ],
        "names": {name: dict(counted) for name, counted in checked.names.items()},
        "warnings": list(result.warnings),
        "unchecked": unchecked(result.kinds),
        "sizes": sizes,
        "images": checked.images,
        "duplicates": _duplicates(checked),
    }


def _sizes(values: Sequence[int], indexes: Sequence[int], tasks: Sequence[Task]) -> dict[str, Any]:
    found = np.asarray(values, dtype=np.int64)
    quantiles = {f"p{at}": int(np.percentile(found, at, method="higher")) for at in (50, 90, 99)}
    longest = int(found.argmax())
    return {**quantiles, "max": int(found[longest]), "longest": tasks[indexes[longest]].task_id}


def _duplicates(checked: CheckedTasks) -> dict[str, Any]:
    """Return how many tasks repeat an earlier question, in the same text and in nearly the same."""
    exact, near = (np.frombuffer(hashes, dtype=np.uint64) for hashes in (checked.exact, checked.near))
    _, first, group = np.unique(near, return_index=True, return_inverse=True)
    repeats = np.flatnonzero(first[group] != np.arange(len(near)))
    same = len(exact) - len(np.unique(exact))
    tasks = checked.result.tasks
    examples = [
        [tasks[int(first[group[index]])].task_id, tasks[int(index)].task_id] for index in repeats[:EXAMPLES]
    ]
    return {"same": same, "near": len(repeats) - same, "examples": examples}


def leakage(train: CheckedTasks, held_out: CheckedTasks) -> dict[str, Any]:
    """Return how many tasks of ``held_out`` ask a question of ``train``, and the ids of some of both."""
    known, asked = (np.frombuffer(item.near, dtype=np.uint64) for item in (train, held_out))
    values, first = np.unique(known, return_index=True)
    places = np.minimum(np.searchsorted(values, asked), len(values) - 1)
    shared = np.flatnonzero(values[places] == asked)
    examples = [
        {
            "train": train.result.tasks[int(first[places[index]])].task_id,
            "eval": held_out.result.tasks[int(index)].task_id,
        }
        for index in shared[:EXAMPLES]
    ]
    return {"tasks": len(shared), "of": len(asked), "examples": examples}
