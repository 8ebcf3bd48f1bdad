"""Only ``agentrl.store`` queries the database: everyone else calls its methods."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "agentrl"


def test_no_module_outside_the_store_uses_its_database() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "store")]
    uses = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "database"
    ]
    assert len(files) > 50
    assert uses == []
