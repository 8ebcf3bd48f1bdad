"""Make arguments of argparse from the fields of flag dataclasses, and show completion a command's parser."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from agentrl.config.flags import Switch, constraint

_TRUE, _FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")


def add_flag(
    parser: argparse._ActionsContainer, item: dataclasses.Field[Any], kind: Any, **changes: Any
) -> None:
    """Add the flag ``item`` of the type ``kind``; ``changes`` are arguments of ``add_argument``.

    A flag that is not given is not in the namespace. A switch may stand without a value; one that is on by
    default or has more than two states has ``--no_`` too.
    """
    plain = plain_type(kind)
    options: dict[str, Any] = {
        "default": argparse.SUPPRESS,
        "help": help_of(
            item, kind, None if changes.get("required") else changes.get("default", item.default)
        ),
        "metavar": kind_name(kind).upper(),
    }
    off: Any = None
    if plain == Switch:
        options |= {"nargs": "?", "const": "true", "type": str.lower, "choices": get_args(Switch)}
        off = "false"
    elif get_origin(plain) is Literal:
        options["choices"] = get_args(plain)
    elif plain is bool:
        options |= {"nargs": "?", "const": True, "type": _boolean}
        off = False if item.default is True or kind is not bool else None
    else:
        options["type"] = plain
    parser.add_argument(f"--{item.name}", **(options | changes))
    if off is not None:
        parser.add_argument(
            f"--no_{item.name}", dest=item.name, action="store_const", const=off, default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )  # fmt: skip


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags by name as the words of a command line."""
    words = []
    for name, value in flags.items():
        words += [f"--{name}", json.dumps(value) if value is None or isinstance(value, bool) else str(value)]
    return words


def plain_type(kind: Any) -> Any:
    """Return the type of a flag without None."""
    if get_origin(kind) is Literal or not get_args(kind):
        return kind
    (plain,) = (part for part in get_args(kind) if part is not NoneType)
    return plain


def choices_of(kind: Any) -> tuple[str, ...]:
    """Return the choices of a flag; none if it has any number of values."""
    plain = plain_type(kind)
    return get_args(plain) if get_origin(plain) is Literal else ()


def kind_name(kind: Any) -> str:
    """Return the name of the type of a flag, without None."""
    if choices_of(kind):
        return "name"
    plain = plain_type(kind)
    return "text" if plain is str else str(plain.__name__)


def help_of(item: dataclasses.Field[Any], kind: Any, default: Any) -> str:
    """Return the help text with range, unit, choices and default."""
    notes = [", ".join(choices_of(kind)), constraint(item)]
    if default not in (None, "", ..., argparse.SUPPRESS):
        notes.append(f"default: {default}")
    ending = "; ".join(filter(None, notes))
    text = f"{item.metadata['help']} ({ending})" if ending else str(item.metadata["help"])
    return text.replace("%", "%%")


def _boolean(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in _TRUE


_collecting: ContextVar[bool] = ContextVar("agentrl_collects_parsers", default=False)


class CollectedParser(BaseException):
    """Ends a command where it would parse its words; ``parser`` is its parser."""

    def __init__(self, parser: argparse.ArgumentParser, command: str) -> None:
        super().__init__(command)
        self.parser = parser
        self.command = command


def collect(command: Callable[[], object]) -> CollectedParser | None:
    """Call ``command`` until it would parse its words; None if it ends before."""
    token = _collecting.set(True)
    try:
        command()
    except CollectedParser as collected:
        return collected
    finally:
        _collecting.reset(token)
    return None


def end_if_collected(parser: argparse.ArgumentParser, command: str) -> None:
    """Raise CollectedParser if ``collect`` called the command whose parser this is."""
    if _collecting.get():
        raise CollectedParser(parser, command)
