"""Collect the argument parser of a command without running it, for shell completion."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
