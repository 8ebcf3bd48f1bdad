"""Find modules by the names that they had in earlier examples and pages: the code of users imports them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

MOVED: Final = {
    "agentrl.base.permissions": "agentrl.base.user_code",
    "agentrl.containers": "agentrl.worlds.containers",
    "agentrl.containers.base": "agentrl.worlds.containers.container",
    "agentrl.rollout.context": "agentrl.rollout.agents",
    "agentrl.rollout.langgraph": "agentrl.worlds.langgraph",
    "agentrl.rollout.langgraph.agent_graph": "agentrl.worlds.langgraph",
    "agentrl.rollout.langgraph.chat_model": "agentrl.worlds.langgraph",
    "agentrl.tools.sandbox": "agentrl.worlds.sandbox",
    "agentrl.tools.stateful": "agentrl.tools.python",
    "agentrl.weights.model_folder": "agentrl.weights.folder",
    "agentrl.worlds.containers.sandbox": "agentrl.worlds.sandbox.container",
    "agentrl.worlds.sandbox.limits": "agentrl.worlds.containers.container",
}
"""Earlier name → name; what lies below a package moved with it."""


def find_moved_modules() -> None:
    """Let the import system find ``MOVED`` from now on. An earlier name is the same module, not a copy.

    First of all finders: for others, what lies below a package that has two names is two modules.
    """
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        earlier = name if name in MOVED else name.rpartition(".")[0]
        if earlier not in MOVED:
            return None
        return ModuleSpec(name, _Alias(MOVED[earlier] + name[len(earlier) :]))


class _Alias(Loader):
    """Loads nothing: hands out the module that has another name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put that of the earlier name there
