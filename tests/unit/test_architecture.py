"""The import floors of the package: imports run down only, and some libraries stay where they belong."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import agentrl

ROOT = Path(agentrl.__file__).parent

FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"rollout"}),
    frozenset({"train", "inference"}),
    frozenset({"observe", "batching", "weights", "conversion", "cli", "commands", "quickstart", "chaos"}),
    frozenset({"store", "scoring", "config", "tools"}),
    frozenset(
        {"losses", "documents", "errors", "extensions", "barrier", "machine", "processes", "supervise"}
    ),
)
"""From the top to the ground; a package imports its own floor and those below it."""

FORBIDDEN = {("rollout", "train"), ("train", "inference"), ("train", "rollout")}

EXCEPTIONS = {
    # The parity check compares the trainer with the engines: it needs both, and nothing imports it.
    ("agentrl.observe.parity", "train"),
    ("agentrl.observe.parity", "inference"),
}

DATABASE_LIBRARIES = {"pymongo", "bson", "gridfs", "motor"}
DATABASE_USERS = ("agentrl.store",)

TORCH_LIBRARIES = {"torch", "accelerate", "safetensors.torch"}
TORCH_USERS = (
    "agentrl.train",
    "agentrl.losses",
    "agentrl.batching",
    "agentrl.weights",
    "agentrl.inference.engines.local",
    "agentrl.quickstart",
)


@dataclass(frozen=True)
class Import:
    """Module ``importer`` imports ``target`` on ``line``."""

    importer: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def test_every_package_has_a_floor() -> None:
    names = {_package(module) for module in _modules()} - {None}
    assert names <= frozenset().union(*FLOORS)


def test_imports_run_down_the_floors_only() -> None:
    assert [str(found) for found in _own_imports() if _breaks_the_floors(found)] == []


def test_packages_import_one_another_without_a_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for found in _own_imports():
        importer, target = _package(found.importer), _package(found.target)
        if importer and target and importer != target and (found.importer, target) not in EXCEPTIONS:
            graph.setdefault(importer, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"packages import one another in a circle: {' → '.join(error.args[1])}")


def test_only_the_store_reaches_the_database_driver() -> None:
    assert _strangers(DATABASE_LIBRARIES, DATABASE_USERS) == []


def test_only_what_computes_imports_torch() -> None:
    assert _strangers(TORCH_LIBRARIES, TORCH_USERS) == []


def test_exceptions_exist() -> None:
    used = {(found.importer, _package(found.target)) for found in _own_imports()}
    assert used >= EXCEPTIONS


def _breaks_the_floors(found: Import) -> bool:
    importer, target = _package(found.importer), _package(found.target)
    if importer is None or target is None or (found.importer, target) in EXCEPTIONS:
        return False
    return (importer, target) in FORBIDDEN or _floor(target) < _floor(importer)


def _floor(package: str) -> int:
    return next(number for number, packages in enumerate(FLOORS) if package in packages)


def _strangers(libraries: set[str], users: tuple[str, ...]) -> list[str]:
    return [
        str(found)
        for found in _imports()
        if any(f"{found.target}.".startswith(f"{library}.") for library in libraries)
        and not found.importer.startswith(users)
    ]


def _package(module: str) -> str | None:
    """The package or top-level module below ``agentrl``; None for ``agentrl`` itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "agentrl" else None


def _modules() -> dict[str, Path]:
    modules = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _own_imports() -> list[Import]:
    return [found for found in _imports() if _package(found.target) not in (None, "__version__")]


def _imports() -> list[Import]:
    return [found for module, path in _modules().items() for found in _imports_of(module, path)]


def _imports_of(module: str, path: Path) -> list[Import]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [Import(module, alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively: write the whole name"
            base = node.module or ""
            found += [Import(module, f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found
