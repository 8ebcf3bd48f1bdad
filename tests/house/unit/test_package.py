"""The package as a whole: no circle of imports, and only ``agentrl.store`` queries the database."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGE = Path(__file__).parents[3] / "src" / "agentrl"


def test_no_two_modules_import_each_other() -> None:
    """Neither directly nor at any distance."""
    graph = grimp.build_graph("agentrl", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"modules import one another in a circle: {' → '.join(error.args[1])}")


def test_no_module_outside_the_store_uses_its_database() -> None:
    """But for the parts of wings that keep or read a run's database."""
    inside = ("store", "lab", "screens/views")
    files = [
        path
        for path in PACKAGE.rglob("*.py")
        if not any(path.is_relative_to(PACKAGE / name) for name in inside)
    ]
    uses = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "database"
    ]
    assert len(files) > 50
    assert uses == []
