"""``agentrl tasks check``: say what is in the tasks of a source, and what would stop a load."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.load import group_of
from agentrl.config.schema import ContainerConfig, TaskConfig
from agentrl.environments.harbor.machine import use_containers
from agentrl.observe.progress import progress
from agentrl.observe.terminal import clean, print_json

_SHOWN = 20


async def check(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if something would stop a load."""
    from agentrl.rollout.check_tasks import leakage, read_checked, report

    use_containers(group_of(ContainerConfig, arguments))
    flags = group_of(TaskConfig, arguments)
    count_tokens = None if arguments.model_name_or_path is None else _counter(arguments.model_name_or_path)
    sources = {"train": arguments.file, **({"eval": flags.eval_file} if flags.eval_file else {})}
    checked, reports = {}, {}
    for split, source in sources.items():
        began = time.monotonic()
        with progress(f"reading {source}"):
            checked[split] = await read_checked(source, split, flags)
        seconds = max(time.monotonic() - began, 1e-3)
        reports[split] = report(source, checked[split], count_tokens)
        reports[split]["rows_per_second"] = round(reports[split]["rows"] / seconds)
    leaked = leakage(checked["train"], checked["eval"]) if "eval" in checked else None
    stops = any(item["bad"] for item in reports.values())
    if arguments.json:
        print_json({**reports["train"], "eval": reports.get("eval"), "leakage": leaked, "loads": not stops})
        return int(stops)
    for item in reports.values():
        _print(item)
    if leaked is not None:
        _line(
            "leakage", f"{leaked['tasks']} of {leaked['of']} eval tasks ask a question of the training tasks"
        )
        _lines("", [f"train {pair['train']} = eval {pair['eval']}" for pair in leaked["examples"]])
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
