"""``agentrl tasks load``, ``check`` and ``list``: load tasks, check a source, count what is loaded.

Memory holds hashes and lengths of the tasks; the tasks themselves are read again where an example is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from agentrl.base.user_code import flags_allowing
from agentrl.config.load import CommandParser, group_of
from agentrl.config.run import DATABASE_FLAGS
from agentrl.config.schema import ContainerConfig, JsonFlags, ModelConfig, RunConfig, TaskConfig, flag
from agentrl.documents.task import Task, scorer_weights
from agentrl.documents.task_file import Item, ReadResult
from agentrl.documents.task_json import kind_of
from agentrl.environments.environment import use_containers
from agentrl.observe.progress import progress
from agentrl.observe.terminal import clean, print_json
from agentrl.rollout.load_tasks import read_source
from agentrl.scoring.answers import (
    COPIED_WORDS,
    copied_words,
    leaked_in,
    normalized_text,
    unchecked,
    word_runs,
)

SOURCE = (
    "a JSONL, JSON, Parquet, CSV or Arrow file, FOLDER[:SPLIT], hf://ORG/NAME[/CONFIG][@REVISION][:SPLIT], a"
    " folder or git bundle of Harbor tasks, env:NAME?n=1000&seed=1, in quotes, or a YAML file that mixes them"
)


READING = ("task_fields", "task_preset", "import_modules")
"""The flags by which the rows of a source are read."""


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How tasks are loaded."""

    split: str = flag("train", "train, eval, …")
    no_shuffle: bool = flag(False, "keep the order of the file")
    update: bool = flag(False, "change loaded tasks that have not begun, and a mixture's weights and gates")
    append: bool = flag(False, "add tasks and sources that the run does not have")


def main(argv: list[str]) -> int:
    """Run ``load``, ``check`` or ``list``."""
    arguments = _parser().parse_args(argv)
    return asyncio.run({"load": _load, "check": check, "list": _list}[arguments.action](arguments))


def _parser() -> CommandParser:
    database = CommandParser(add_help=False)
    database.add_flags(RunConfig, "run_name", required=True)
    database.add_flags(RunConfig, *DATABASE_FLAGS)
    parser = CommandParser(
        prog="agentrl tasks", description="The tasks of a run, and of a source before they are loaded."
    )
    actions = parser.add_subparsers(dest="action", required=True, parser_class=CommandParser)
    load = actions.add_parser("load", parents=[database], help="load a task file, or tasks of an environment")
    load.add_argument("file", help=SOURCE)
    load.add_flags(LoadFlags)
    load.add_flags(TaskConfig, "num_generations", "skip_bad_lines", *READING)
    load.add_flags(RunConfig, "seed")
    load.add_flags(ContainerConfig)
    checked = actions.add_parser(
        "check", help="say what is in the tasks of a source; exit code 1: it would not load"
    )
    checked.add_argument("file", help=SOURCE)
    checked.add_flags(TaskConfig, "eval_file", *READING)
    checked.add_flags(ModelConfig, "model_name_or_path")
    checked.add_flags(ContainerConfig)
    checked.add_flags(JsonFlags)
    counts = actions.add_parser("list", parents=[database], help="count the run's tasks by split and state")
    counts.add_flags(JsonFlags)
    return parser


async def _load(arguments: argparse.Namespace) -> int:
    tasks = group_of(TaskConfig, arguments)
    use_containers(group_of(ContainerConfig, arguments))
    from agentrl.rollout.load_tasks import read_source, store_tasks
    from agentrl.store.client import open_store

    with progress(f"reading {arguments.file}"):
        tasks = replace(tasks, shuffle_tasks=not arguments.no_shuffle)
        result = await read_source(arguments.file, tasks, split=arguments.split, seed=arguments.seed)
    if result.reading is not None:
        print(clean(result.reading))
    for warning in result.warnings:
        print(f"warning  {warning}")
    async with await open_store(group_of(RunConfig, arguments)) as store:
        if arguments.split == "train":
            await store.settings.begin("tasks", {"num_generations": tasks.num_generations}, "tasks")
        with progress(f"storing tasks in run {arguments.run_name}"):
            loaded, refused = await store_tasks(
                store, result, update=arguments.update, append=arguments.append
            )
    if refused:
        flags = clean(flags_allowing(refused))
        print(f"warning  this user may not write Imports: start samplers with {flags}")
    for reason in result.skipped:
        print(f"skipped  {reason}")
    for task_id in loaded.left:
        print(f"left     {clean(task_id)}: its text differs, and it has begun")
    if loaded.withdrawn:
        print(f"left out  {loaded.withdrawn} tasks that were withdrawn (agentrl retract)")
    updated = f", {loaded.updated} of them updated" if arguments.update else ""
    print(
        f"{arguments.run_name}/{arguments.split}: {loaded.inserted} tasks loaded,"
        f" {loaded.existing} there already{updated}, {len(result.skipped)} skipped"
    )
    return 0


async def _list(arguments: argparse.Namespace) -> int:
    from agentrl.observe.terminal import print_json
    from agentrl.store.client import open_existing

    async with await open_existing(group_of(RunConfig, arguments)) as store:
        rows: list[dict[str, Any]] = [
            {"split": split, "epoch": epoch, "tasks": await store.tasks.counts(split, epoch)}
            for split in await store.tasks.splits()
            for epoch in await store.tasks.epochs(split)
        ]
    if arguments.json:
        print_json({"run_name": arguments.run_name, "epochs": rows})
    elif not rows:
        print(f"{arguments.run_name}: no tasks\n  → agentrl tasks load FILE.jsonl --run_name …")
    else:
        for row in rows:
            states = "  ".join(f"{status.value} {count}" for status, count in row["tasks"].items())
            print(f"{row['split']}  epoch {row['epoch']}  {states}")
    return 0


_SHOWN = 20


async def check(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if something would stop a load."""

    use_containers(group_of(ContainerConfig, arguments))
    flags = group_of(TaskConfig, arguments)
    count_tokens = None if arguments.model_name_or_path is None else _counter(arguments.model_name_or_path)
    # Read the held-out tasks first: the runs of words in memory are those of the smaller source.
    sources = {**({"eval": flags.eval_file} if flags.eval_file else {}), "train": arguments.file}
    overlaps = Overlaps() if flags.eval_file else None
    checked, reports = {}, {}
    for split, source in sources.items():
        began = time.monotonic()
        with progress(f"reading {source}"):
            checked[split] = await read_checked(source, split, flags, overlaps)
        seconds = max(time.monotonic() - began, 1e-3)
        reports[split] = report(source, checked[split], count_tokens)
        reports[split]["rows_per_second"] = round(reports[split]["rows"] / seconds)
    leaked = None if overlaps is None else leakage(checked["train"], checked["eval"], overlaps)
    stops = any(item["bad"] for item in reports.values())
    if arguments.json:
        print_json({**reports["train"], "eval": reports.get("eval"), "leakage": leaked, "loads": not stops})
        return int(stops)
    for item in reversed(reports.values()):
        _print(item)
    if leaked is not None:
        _line(
            "leakage", f"{leaked['tasks']} of {leaked['of']} eval tasks ask a question of the training tasks"
        )
        _lines("", [f"train {pair['train']} = eval {pair['eval']}" for pair in leaked["examples"]])
        near = leaked["near"]
        _line(
            "", f"{near['tasks']} more have half of their runs of {COPIED_WORDS} words from one training task"
        )
        _lines("", [f"train {pair['train']} ≈ eval {pair['eval']}" for pair in near["examples"]])
    print("→ this would not load" if stops else "→ this loads")
    return int(stops)


def _counter(folder: str) -> Callable[[Sequence[str]], list[int]]:
    """Return a function that counts the tokens of texts. Raises ConfigError without a tokenizer."""
    from agentrl.chat.model_folder import read_tokenizer_file

    tokenizer = read_tokenizer_file(Path(folder) / "tokenizer.json")
    return lambda texts: [len(item.ids) for item in tokenizer.encode_batch(list(texts))]


def _print(report: Mapping[str, Any]) -> None:
    print(
        f"{clean(report['source'])}: {report['tasks']} tasks, {len(report['bad'])} bad rows"
        f" ({report['rows_per_second']:,} rows/s)"
    )
    if report["reading"]:
        print(f"  {clean(report['reading'])}")
    if len(report["presets"]) > 1:
        _line("presets", _counts(report["presets"]))
    for item in report["fields"]:
        empty = "" if item["filled"] == 1 else f", filled in {item['filled']:.1%}"
        _line("field", f"{item['name']}: {_counts(item['kinds'])}{empty}")
    for name, counted in report["names"].items():
        if counted:
            _line(name, _counts(counted))
    for unit, sizes in report["sizes"].items():
        of = f" of {sizes['tasks']} tasks" if "tasks" in sizes else ""
        numbers = ", ".join(f"{name} {sizes[name]}" for name in ("p50", "p90", "p99", "max"))
        _line(unit, f"{numbers}{of}; the longest is {sizes['longest']}")
    if report["images"]:
        _line("images", str(report["images"]))
    duplicates = report["duplicates"]
    _line(
        "duplicates",
        f"{duplicates['same']} with the same question, {duplicates['near']} with nearly the same",
    )
    _lines("", [" = ".join(pair) for pair in duplicates["examples"]])
    if leaks := report["leaks"]["tasks"]:
        _line("answers", f"{leaks} tasks give theirs in the prompt; choices and extracts do so on purpose")
        _lines("", [f"{item['task']}, in {item['in']}" for item in report["leaks"]["examples"]])
    _lines("warning", report["warnings"])
    if report["unchecked"]:
        _line("not checked", f"whether right answers score 1 with {', '.join(report['unchecked'])}")
    _lines("bad row", report["bad"])


def _counts(counted: Mapping[str, int]) -> str:
    first = sorted(counted.items(), key=lambda item: -item[1])[:_SHOWN]
    return ", ".join(f"{name} {count}" for name, count in first) + (", …" if len(counted) > _SHOWN else "")


def _line(name: str, text: str) -> None:
    print(f"  {name:<14}{clean(text)}")


def _lines(name: str, texts: Sequence[str]) -> None:
    for text in texts[:_SHOWN]:
        _line(name, text)
    if len(texts) > _SHOWN:
        _line(name, f"… and {len(texts) - _SHOWN} more")


EXAMPLES: Final = 5
_FIELDS = 200
"""Columns of a source that are counted."""
_COUNTED = 10_000
"""Tasks whose tokens are counted."""
_NAMES = ("scorer", "answer_schema", "agent_name", "environment")


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
    leaks: dict[int, str] = field(default_factory=dict)
    """Index of a task → where its prompt gives its answer."""
    overlaps: Overlaps | None = None
    is_held_out: bool = False

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
        self.near.append(_hash(normalized_text(task.query) + decides))
        self.characters.append(len(_said(task)))
        self.images += len(task.images)
        place = len(self.exact) - 1
        if (where := leaked_in(task)) is not None:
            self.leaks[place] = where
        if self.overlaps is not None:
            (self.overlaps.add if self.is_held_out else self.overlaps.look)(place, task.query)


def _said(task: Task) -> str:
    """Return what a task says before the model does: its few-shot messages and its question."""
    return "".join([*(str(item.get("content") or "") for item in task.messages), task.query])


_COMMON = 10
"""Held-out tasks from which on a run of words that they share is their instruction."""


class Overlaps:
    """Finds the held-out questions of which half of the runs of words stand in one training task.

    ``add`` all held-out questions, then ``look`` at the training tasks: linear in their words.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[int]] = defaultdict(list)
        """Hash of a run → the held-out tasks that have it."""
        self._runs: Counter[int] = Counter()
        """Held-out task → its runs that are no instruction."""
        self.found: dict[int, int] = {}
        """Held-out task → the first training task that has half of its runs."""

    def add(self, place: int, question: str) -> None:
        """Add a held-out question."""
        for run in _hashed_runs(question):
            tasks = self._held[run]
            tasks.append(place)
            self._runs[place] += 1
            if len(tasks) == _COMMON:
                self._runs.subtract(tasks)
            elif len(tasks) > _COMMON:
                self._runs[place] -= 1

    def look(self, place: int, question: str) -> None:
        """Look at a training task."""
        known = (self._held.get(run, ()) for run in _hashed_runs(question))
        shared = Counter(task for tasks in known if len(tasks) < _COMMON for task in tasks)
        for task, count in shared.items():
            if 2 * count >= self._runs[task]:
                self.found.setdefault(task, place)


def _hashed_runs(question: str) -> set[int]:
    """Return hashes, which differ from process to process, of the runs of words; of fewer words none."""
    text = normalized_text(question)
    words = copied_words(text)
    return set() if text.count(" ") < words - 1 else set(map(hash, word_runs(text, words)))


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


async def read_checked(
    source: str, split: str, flags: TaskConfig, overlaps: Overlaps | None = None
) -> CheckedTasks:
    """Read and count the tasks of ``source``; bad rows are in ``result.skipped``. Raises TaskFileError."""
    checked = CheckedTasks(overlaps=overlaps, is_held_out=split == "eval")
    flags = replace(flags, shuffle_tasks=False, skip_bad_lines=True)
    checked.result = await read_source(source, flags, split=split, look=checked.look)
    return checked


def report(
    source: str, checked: CheckedTasks, count_tokens: Callable[[Sequence[str]], list[int]] | None
) -> dict[str, Any]:
    """Return what ``agentrl tasks check`` says about one source, as JSON values.

    ``count_tokens`` returns the number of tokens of each text; it gets those of at most 10,000 tasks.
    """
    result, tasks = checked.result, checked.result.tasks
    total = len(tasks) + len(result.skipped)
    sizes = {"characters": _sizes(checked.characters, range(len(tasks)), tasks)}
    if count_tokens is not None:
        chosen = range(0, len(tasks), max(1, -(-len(tasks) // _COUNTED)))
        counts = count_tokens([_said(tasks[index]) for index in chosen])
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
        "leaks": {
            "tasks": len(checked.leaks),
            "examples": [
                {"task": tasks[place].task_id, "in": where}
                for place, where in islice(checked.leaks.items(), EXAMPLES)
            ],
        },
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


def leakage(train: CheckedTasks, held_out: CheckedTasks, overlaps: Overlaps) -> dict[str, Any]:
    """Return how many tasks of ``held_out`` ask a question of ``train``, and the ids of some of both.

    ``near`` counts those that do not, and share their runs of words with one.
    """
    known, asked = (np.frombuffer(item.near, dtype=np.uint64) for item in (train, held_out))
    values, first = np.unique(known, return_index=True)
    places = np.minimum(np.searchsorted(values, asked), len(values) - 1)
    shared = np.flatnonzero(values[places] == asked)
    same = {int(index): int(first[places[index]]) for index in shared}
    near = {place: found for place, found in sorted(overlaps.found.items()) if place not in same}

    def examples(pairs: Mapping[int, int]) -> list[dict[str, str]]:
        return [
            {"train": train.result.tasks[other].task_id, "eval": held_out.result.tasks[place].task_id}
            for place, other in islice(pairs.items(), EXAMPLES)
        ]

    return {
        "tasks": len(same),
        "of": len(asked),
        "examples": examples(same),
        "near": {"tasks": len(near), "examples": examples(near)},
    }
