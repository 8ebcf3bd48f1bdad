"""Import every module as if no extra but the trainer's were installed; print those that cannot be."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Absent(MetaPathFinder):
    """Hides packages."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse a module of a hidden package."""
        if fullname in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


sys.meta_path.insert(0, Absent(sys.argv[1:]))

import agentrl.errors  # noqa: E402  the packages must be hidden first

missing: dict[str, str | None] = {}
for module in pkgutil.walk_packages(agentrl.__path__, "agentrl."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
    except agentrl.errors.ConfigError as error:
        missing[module.name] = getattr(error.__cause__, "name", None)
print(json.dumps(missing))
