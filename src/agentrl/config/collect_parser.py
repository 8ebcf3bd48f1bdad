"""Collect the argument parser of a command without running it, for shell completion."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from agentrl.config.schema import GROUPS, sections

_collecting: ContextVar[bool] = ContextVar("agentrl_collects_parsers", default=False)


class CollectedParser(BaseException):
    """Ends a command where it would parse its words; ``parser`` is its parser."""

    def __init__(self, parser: argparse.ArgumentParser, command: str) -> None:
        super().__init__(command)
        self.parser = parser
        self.command = command


@contextmanager
def _collect() -> Iterator[None]:
    token = _collecting.set(True)
    try:
        yield
    finally:
        _collecting.reset(token)


def collect(command: Callable[[], object]) -> CollectedParser | None:
    """Call ``command`` until it would parse its words; None if it ends before."""
    try:
        with _collect():
            command()
    except CollectedParser as collected:
        return collected
    return None


def collecting() -> bool:
    """Return whether a parser is being collected."""
    return _collecting.get()


def flags_parser(command: str, shown: Sequence[type], extra: Sequence[type]) -> argparse.ArgumentParser:
    """Return a parser with every flag; those of groups that are not ``shown`` are hidden."""
    parser = argparse.ArgumentParser(prog=command, add_help=True, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file of flags")
    parser.add_argument("-v", action="store_true", help=argparse.SUPPRESS)
    known = {"config"}
    for groups, is_shown in (((*extra, *shown), True), (GROUPS, False)):
        for section in sections(*groups):
            for item in section.flags:
                if item.name in known:
                    continue
                known.add(item.name)
                help_line = str(item.metadata["help"]).replace("%", "%%") if is_shown else argparse.SUPPRESS
                parser.add_argument(f"--{item.name}", help=help_line, **_values(section.types[item.name]))
    return parser


def _values(kind: Any) -> dict[str, Any]:
    """Return the choices of a flag, and whether its value may be left out, as arguments of argparse."""
    parts = [part for part in get_args(kind) if part is not NoneType] if get_origin(kind) else [kind]
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    (part,) = parts[:1] or (str,)
    if get_origin(part) is Literal:
        return {"choices": get_args(part)}
    if part is bool:
        return {"nargs": "?", "choices": ("true", "false")}
    return {}
