"""No module of the package imports another that imports it in turn, at any distance."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_two_modules_import_each_other() -> None:
    graph = grimp.build_graph("agentrl", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"modules import one another in a circle: {' → '.join(error.args[1])}")
