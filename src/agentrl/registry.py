"""Functions found by name: registered by a decorator, by an entry point, or by a path ``module:function``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from agentrl.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_allowed: ContextVar[set[str] | None] = ContextVar("agentrl_allowed_imports", default=None)


def allow_imports(names: Iterable[str]) -> None:
    """Import a path ``module:function`` only if it, its module or a package above it is among ``names``.

    Further calls add names. Without any call, every path may be imported: names that come from a database
    that others write must not decide what this process imports.
    """
    allowed = _allowed.get()
    if allowed is None:
        _allowed.set(set(names))
    else:
        allowed.update(names)


def paths_among(names: Iterable[str]) -> frozenset[str]:
    """Those of ``names`` that are paths ``module:function``."""
    return frozenset(name for name in names if ":" in name)


def is_importable(name: str) -> bool:
    """Whether this process may import ``name``; other names are not imported."""
    allowed = _allowed.get()
    module = name.partition(":")[0]
    if ":" not in name or allowed is None:
        return True
    parts = module.split(".")
    packages = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return name in allowed or not packages.isdisjoint(allowed)


def check_importable(name: str, kind: str = "function") -> None:
    """ConfigError unless this process may import ``name``."""
    if not is_importable(name):
        raise ConfigError(
            f"the {kind} {name!r} is of a module that this process may not import",
            hint=f"if you trust it: --allowed_modules {name.partition(':')[0]}, or load the task file that"
            " names it with `agentrl tasks load` as a user who may write Imports",
        )


class Registry(Generic[F]):
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
            check_importable(name, self._kind)
            return self._from_path(name)
        for point in entry_points(group=self._group, name=name):
            return self._imported(name, point.load)
        known = self.names()
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(
            f"there is no {self._kind} {name!r}",
            hint=f"{hint}known: {', '.join(known)}; or give a Python path module:function",
        )

    def _load_built_in(self) -> None:
        for module in self._built_in:
            importlib.import_module(module)

    def _from_path(self, path: str) -> F:
        module, _, attribute = path.partition(":")
        found = self._imported(path, lambda: getattr(importlib.import_module(module), attribute))
        if not callable(found):
            raise ConfigError(
                f"the {self._kind} {path!r} is not a function", hint="name a function of the module"
            )
        return found

    def _imported(self, name: str, load: Callable[[], F]) -> F:
        """Return what ``load`` imports; ConfigError for whatever its module raises."""
        try:
            return load()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"the {self._kind} {name!r} cannot be imported: {type(error).__name__}: {error}",
                hint="the path is module:function; the module's folder must be on PYTHONPATH",
            ) from error
