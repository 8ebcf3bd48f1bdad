"""Hold the walks of a run to their figures, and to the lists of files in CONTRIBUTING.md."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Final

from walks.walk import WAYS, Walk, read_calls, walk

FIGURES: Final = Path(__file__).with_name("figures.json")
"""The most files and returns of each walk: those of several runs together; one does not meet each case."""

_RARE: Final = {"files": 3, "returns": 20}
"""How far a run may differ: it may meet a retry or an outage that the recorded runs did not."""

_RECORDER: Final = Path(__file__).with_name("recorder")
_PAGE: Final = Path(__file__).parents[2] / "CONTRIBUTING.md"
_BELOW: Final = ("base", "config", "documents", "observe", "store")
"""Packages that most others call. Their files, and those in no package, are listed after the way."""


def recording(folder: Path) -> dict[str, str]:
    """Make a folder, and return the environment in which a run records its walks there."""
    folder.mkdir()
    path = os.pathsep.join(filter(None, (str(_RECORDER), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "WALK_TRACES": str(folder)}


def read_walks(folder: Path) -> dict[str, Walk]:
    """Return the walks that a run recorded; each is that of all its processes."""
    found = {}
    for name, way in WAYS.items():
        traces = sorted(folder.glob(f"{way.command}-*.tsv"))
        assert traces, f"no `agentrl {way.command}` went on for long enough to record {way.title.lower()}"
        found[name] = walk(read_calls(traces), way.begins)
    return found


def require_short_walks(folder: Path) -> None:
    """Print the walks of a run. Fail if one is longer than before, or CONTRIBUTING.md lists other files."""
    walks = read_walks(folder)
    print(*(shown(name, found) for name, found in walks.items()), sep="\n")
    problems = [problem for name, found in walks.items() for problem in _problems(name, found)]
    assert not problems, "\n".join(problems)


def _problems(name: str, found: Walk) -> Iterable[str]:
    title = WAYS[name].title
    for what, figure in stored_figures()[name].items():
        if (number := found.figures[what]) > figure + _RARE[what]:
            yield (
                f"{title} has {number} {what}, {figure} before: shorten it, or raise the figure in"
                f" {FIGURES.name} and say why in {_PAGE.name}"
            )
    other = {*found.files} ^ {file for part in listed(title) for file in part}
    if len(other) > _RARE["files"]:
        yield (
            f"{_PAGE.name} lists other files for {title}: {', '.join(sorted(other))};"
            " the walk of this run is printed above"
        )


def stored_figures() -> dict[str, dict[str, int]]:
    """Return the stored figures of each walk."""
    figures: dict[str, dict[str, int]] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return figures


def split(files: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the files of the way, in order, and the sorted files of the packages below."""
    below = {file for file in files if _package(file) in (*_BELOW, "")}
    return [file for file in files if file not in below], sorted(below, key=_folder_first)


def listed(title: str) -> tuple[list[str], list[str]]:
    """Return the files that CONTRIBUTING.md lists for a walk, as ``split`` does."""
    section = _PAGE.read_text(encoding="utf-8").partition(f"\n### {title}")[2].partition("\n#")[0]
    way, _, below = section.partition("\nBelow")
    steps = [re.split(r":\s", step)[0] for step in re.split(r"^\d+\. ", way, flags=re.MULTILINE)[1:]]
    return _files_in(" ".join(steps)), sorted(_files_in(below), key=_folder_first)


def _files_in(text: str) -> list[str]:
    return [file for word in re.findall(r"`([^`]+\.py)`", text) for file in _expand(word)]


def _expand(pattern: str) -> list[str]:
    """Write ``{a,b}`` out, as a shell does."""
    begin, _, rest = pattern.partition("{")
    words, _, end = rest.partition("}")
    return [f"{begin}{word}{end}" for word in words.split(",")] if rest else [pattern]


def shown(name: str, found: Walk) -> str:
    """Return a walk as CONTRIBUTING.md lists it, without what happens in the files."""
    way, below = split(found.files)
    steps = [", ".join(_short(list(files))) for _, files in groupby(way, _package)]
    figures = ", ".join(f"{number} {what}" for what, number in found.figures.items())
    return "\n".join(
        (
            f"### {WAYS[name].title}: {figures}",
            *(f"{number}. {step}: …" for number, step in enumerate(steps, 1)),
            f"Below: {', '.join(_short(below))}.",
        )
    )


def _short(files: list[str]) -> list[str]:
    """Return consecutive files of one folder as one word, `folder/{one,other}.py`."""
    words = []
    for folder, group in groupby(files, lambda file: file.rpartition("/")[0]):
        names = [file.rpartition("/")[2].removesuffix(".py") for file in group]
        text = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
        words.append(f"`{folder}/{text}.py`" if folder else f"`{text}.py`")
    return words


def _package(file: str) -> str:
    return file.partition("/")[0] if "/" in file else ""


def _folder_first(file: str) -> tuple[str, str]:
    return file.rpartition("/")[0], file
