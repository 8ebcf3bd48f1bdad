"""docs/when_something_fails.md: its words of errors are words that the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from docs_pages import DOCS, ROOT

PAGE = (DOCS / "when_something_fails.md").read_text(encoding="utf-8")


def test_every_quoted_error_is_in_the_code() -> None:
    texts = "\n".join(
        text
        for path in sorted((ROOT / "src/agentrl").rglob("*.py"))
        if "Error(" in (source := path.read_text(encoding="utf-8"))
        for text in _strings(ast.parse(source))
    )
    errors = PAGE.split("## Before anything starts")[1].split("## It runs, but")[0]
    cells = [row.split(" | ")[0] for row in errors.splitlines() if row.startswith("| `")]
    quoted = [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 20
    assert [words for words in quoted if not _said(words, texts)] == []


def _said(words: str, texts: str) -> bool:
    words = words.removesuffix(" --…")
    return words in texts or words == "unknown flag"


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a module: adjacent parts of an f-string are joined, and a value becomes ``…``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
