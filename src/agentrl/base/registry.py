"""Find extensions by name: registered by a decorator or an entry point, or a path ``module:name``."""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from agentrl.base.user_code import require_allowed
from agentrl.errors import ConfigError

T = TypeVar("T")

logger = logging.getLogger(__name__)


def import_modules(names: Iterable[str]) -> None:
    """Import modules of the operator, which register extensions by name.

    Raises ConfigError for one that cannot be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        # Catch SystemExit too: a script without a guard around its main part exits when imported.
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"the module {name!r} (--import_modules) cannot be imported: {type(error).__name__}: {error}",
                hint="its file must lie in the working folder or on PYTHONPATH",
            ) from error


def refuse_bare(names: Sequence[object], decorator: str) -> None:
    """Raise ConfigError for a decorator without parentheses: it would take the function for its own name."""
    if names and not isinstance(names[0], str):
        name = getattr(names[0], "__name__", "name")
        raise ConfigError(f"@{decorator} has no name", hint=f'write @{decorator}("{name}")')


class Registry(Generic[T]):
    """The extensions of one kind, such as scorers: functions, classes or other objects of type ``T``.

    ``get`` looks for a name in this order: registered in this process, a path ``module:name``, an entry
    point. Modules with built-in extensions are imported on the first look-up.
    """

    def __init__(
        self,
        kind: str,
        *,
        group: str,
        flag: str = "",
        built_in: Sequence[str] = (),
        convert: Callable[[Any], T] | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> None:
        """``kind`` names an extension in errors, such as ``scorer``; ``group`` is the entry-point group;
        ``flag`` is the command-line flag that chooses one, if there is one.

        ``built_in`` names the modules that register built-in extensions; those of a wing that is not there
        are left out. ``convert`` turns the object of a path or of an entry point into a ``T``, or raises
        TypeError; by default any callable passes as it is. ``hints`` has what to use instead of names that
        users know from elsewhere, by their letters and digits in lower case.
        """
        self._kind = kind
        self._group = group
        self._flag = f" ({flag})" if flag else ""
        self._built_in = tuple(built_in)
        self._convert = convert or _callable
        self._hints = hints or {}
        self._registered: dict[str, T] = {}
        self._absent: set[str] = set()
        """Wings with built-in extensions whose folder is not there."""

    def register(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that registers a function or class under ``names`` and returns it."""

        def decorate(extension: T) -> T:
            self.add(extension, *names)
            return extension

        return decorate

    def add(self, extension: T, *names: str) -> None:
        """Register ``extension`` under ``names``; a name that is registered already is replaced."""
        for name in names:
            self._registered[name] = extension

    def registered(self) -> dict[str, T]:
        """Return the extensions that are built in or registered in this process, by name."""
        self._import_built_in()
        return dict(self._registered)

    def known(self) -> dict[str, T]:
        """Return every extension by name: registered in this process, built in, or from an entry point."""
        known = self.registered()
        for point in entry_points(group=self._group):
            if point.name not in known:
                # Leave a broken package out: it must not end the command of somebody who does not use it.
                try:
                    known[point.name] = self._import(point.name, point.load)
                except ConfigError as error:
                    logger.warning("%s; it is left out", error.message)
        return known

    def names(self) -> list[str]:
        """Return every name, sorted: registered in this process, built in, or from an entry point."""
        return sorted({*self.registered(), *(point.name for point in entry_points(group=self._group))})

    def get(self, name: str) -> T:
        """Return the extension called ``name``.

        Raises ConfigError for an unknown name, with the nearest known one; for a path that this process may
        not import (``permissions.allow``); and for a module that cannot be imported.
        """
        self._import_built_in()
        if name in self._registered:
            return self._registered[name]
        if ":" in name:
            # Ask before the import, which runs the module.
            require_allowed(name, self._kind)
            module, _, attribute = name.partition(":")
            return self._import(name, lambda: getattr(importlib.import_module(module), attribute))
        # Load this one alone: a broken package beside it must not end the command.
        for point in entry_points(group=self._group, name=name):
            return self._import(name, point.load)
        raise self.unknown(name, self.names())

    def unknown(self, name: str, known: Sequence[str]) -> ConfigError:
        """Return the error for a name that is not in ``known``, with the nearest known name."""
        hint = self._hints.get("".join(filter(str.isalnum, name.lower()))) or _hint(name, known)
        if self._absent:
            hint += f"; {' and '.join(sorted(self._absent))}, which may have it, is not installed"
        return ConfigError(
            f"unknown {self._kind} {name!r}{self._flag}"
            + (f"; choose one of {', '.join(known)}" if known else ""),
            hint=hint,
        )

    def _import_built_in(self) -> None:
        for module in self._built_in:
            wing = _wing(module)
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name != wing:
                    raise
                self._absent.add(wing)
        # Forget them only now: an import that fails is tried, and reported, at the next look-up too.
        self._built_in = ()

    def _import(self, name: str, load: Callable[[], Any]) -> T:
        """Return what ``load`` imports, converted; ConfigError for anything that the import raises."""
        try:
            extension = load()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"the {self._kind} {name!r} cannot be imported: {type(error).__name__}: {error}",
                hint="the path is module:name; its file must lie in the working folder or on PYTHONPATH",
            ) from error
        try:
            return self._convert(extension)
        except TypeError as error:
            raise ConfigError(
                f"{name!r} cannot be used as {self._kind}: {error}",
                hint=f"give the path of a {self._kind}, as in assets/examples",
            ) from error


def _wing(module: str) -> str:
    """Return the package right below ``agentrl`` that holds ``module``.

    Only its folder may be absent: a misspelled module of a package that is there stays an error.
    """
    return ".".join(module.split(".")[:2])


def _callable(extension: Any) -> Any:
    if not callable(extension):
        raise TypeError(f"it is of type {type(extension).__name__}, not a function or class")
    return extension


_OWN = "give its path module:name, or --import_modules the module that registers it"


def _hint(name: str, known: Sequence[str]) -> str:
    """Return a hint with the nearest of ``known``, ignoring case, if one is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1)
    if not nearest:
        return f"if it is one of your own, {_OWN}"
    return f"did you mean {by_lower[nearest[0]]!r}? If it is one of your own, {_OWN}"
