"""Functions found by name: registered by a decorator, by an entry point, or by a path ``module:function``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from agentrl.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class Extensions(Generic[F]):
    """One kind of extension point. Modules that register built-in functions are imported on first use."""

    def __init__(self, kind: str, *, group: str, built_in: Sequence[str]) -> None:
        """``kind`` names it in errors, ``group`` is its entry-point group, ``built_in`` its own modules."""
        self._kind = kind
        self._group = group
        self._built_in = tuple(built_in)
        self._registered: dict[str, F] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        """A decorator that registers a function under ``names``."""

        def decorate(function: F) -> F:
            for name in names:
                self._registered[name] = function
            return function

        return decorate

    def names(self) -> list[str]:
        """Every registered name, built in or from an entry point."""
        self._load_built_in()
        return sorted({*self._registered, *(point.name for point in entry_points(group=self._group))})

    def get(self, name: str) -> F:
        """The function of a name or of a path ``module:function``; ConfigError if there is none."""
        self._load_built_in()
        if name in self._registered:
            return self._registered[name]
        if ":" in name:
            return self._from_path(name)
        for point in entry_points(group=self._group, name=name):
            loaded: F = point.load()
            return loaded
        known = self.names()
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(
            f"there is no {self._kind} {name!r}",
            cure=f"{hint}known: {', '.join(known)}; or give a Python path module:function",
        )

    def _load_built_in(self) -> None:
        for module in self._built_in:
            importlib.import_module(module)

    def _from_path(self, path: str) -> F:
        module, _, attribute = path.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the {self._kind} {path!r} cannot be imported: {error}",
                cure="the path is module:function; the module's folder must be on PYTHONPATH",
            ) from error
        if not callable(found):
            raise ConfigError(f"the {self._kind} {path!r} is no function", cure="name an async function")
        typed: F = found
        return typed
