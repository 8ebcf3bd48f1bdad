"""Commands in hints can be pasted into a shell: a path in them is one word, also with a space in it."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import quoted

ROOT = Path(__file__).parents[3]
NAMES_A_PATH = re.compile(r"path|folder|file\b|_?dir|output|location|\.out\b|place|model\b", re.IGNORECASE)
"""Expressions that are paths."""
IS_AN_ARGUMENT = re.compile(r"(--[a-z_]+[ =]|\b(chmod \d+|fuser|cd|rm|tar|-t UTF-8) |> )$")
"""The text before an argument of a command."""


def _hints(tree: ast.AST) -> Iterator[ast.JoinedStr]:
    """Yield the texts that are hints, and those that name a command of ``agentrl``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "hint":
            yield from (each for each in ast.walk(node.value) if isinstance(each, ast.JoinedStr))
        elif isinstance(node, ast.JoinedStr) and any(
            isinstance(part, ast.Constant) and "agentrl " in str(part.value) for part in node.values
        ):
            yield node


def _arguments(hint: ast.JoinedStr) -> Iterator[str]:
    for before, part in zip(hint.values, hint.values[1:], strict=False):
        if (
            isinstance(before, ast.Constant)
            and isinstance(part, ast.FormattedValue)
            and IS_AN_ARGUMENT.search(str(before.value))
        ):
            yield ast.unparse(part.value)


def test_a_quoted_value_is_one_word() -> None:
    assert shlex.split(quoted(Path("/a folder/it's"))) == ["/a folder/it's"]
    assert quoted("/plain/path") == "/plain/path"


def test_paths_in_hints_are_quoted() -> None:
    found = {
        f"{file.relative_to(ROOT)}:{hint.lineno}": argument
        for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "assets").rglob("*.py")]
        for hint in _hints(ast.parse(file.read_text(encoding="utf-8")))
        for argument in _arguments(hint)
        if NAMES_A_PATH.search(argument) and not argument.startswith("shlex.")
    }
    assert {place: argument for place, argument in found.items() if not argument.startswith("quoted(")} == {}
    assert len(found) > 8
