"""Modules by the names that users know from earlier examples: the same module, found by any way to import."""

from __future__ import annotations

import importlib
import sys

import pytest

from agentrl.base.moved import MOVED


@pytest.mark.parametrize(
    ("earlier", "name"),
    [
        *MOVED.items(),
        ("agentrl.containers.docker", "agentrl.worlds.containers.docker"),
        ("agentrl.tools.sandbox.tool", "agentrl.worlds.sandbox.tool"),
    ],
)
def test_an_earlier_name_is_the_same_module(earlier: str, name: str) -> None:
    if "langgraph" in name:
        pytest.importorskip("langgraph")
    module = importlib.import_module(name)
    assert importlib.import_module(earlier) is module
    assert sys.modules[earlier] is module
    assert module.__spec__.name == name


def test_other_names_are_missing_as_ever() -> None:
    for name in ("agentrl.containers.nothing", "agentrl.nothing", "agentrl.tools.nothing"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
