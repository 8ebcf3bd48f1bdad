"""Declare flags as dataclass fields, check their values, and make arguments of argparse from them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from agentrl.errors import ConfigError

Switch = Literal["auto", "true", "false"]
"""Type of a flag that is on, off, or decided at start. YAML's true and false are values of it too."""

Auto = Literal["auto"]
"""Beside a number in the type of a flag: AgentRL finds the number itself."""

_LARGEST_INTEGER = 2**63 - 1
"""MongoDB stores no larger one."""
_LONGEST_SECONDS = 10**9
"""32 years. Dates end at the year 9999, and timers of threads after 292 years."""
_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600}


@dataclass(frozen=True, slots=True)
class Range:
    """The interval of valid values of a flag, read from mathematical notation such as ``[0, 1)``."""

    low: float
    high: float
    includes_low: bool
    includes_high: bool

    @classmethod
    def parse(cls, text: str) -> Range:
        """Read ``[0, 1)``; a square bracket includes its end, a round one excludes it."""
        low, high = (float(number) for number in text[1:-1].split(","))
        return cls(low, high, text[0] == "[", text[-1] == "]")

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.includes_low else value > self.low
        below = value <= self.high if self.includes_high else value < self.high
        return above and below

    def __str__(self) -> str:
        """Return the range as help texts show it, such as ``≥ 1 or inf``."""
        if not math.isinf(self.high):
            ends = "[" if self.includes_low else "(", "]" if self.includes_high else ")"
            return f"in {ends[0]}{self.low:.10g}, {self.high:.10g}{ends[1]}"
        if math.isinf(self.low):
            return "finite"
        return f"{'≥' if self.includes_low else '>'} {self.low:g}{' or inf' if self.includes_high else ''}"


def flag(
    default: Any,
    help: str,
    *,
    within: str | None = None,
    unit: str | None = None,
    secret: bool = False,
    ignored: bool = False,
    per_process: bool = False,
) -> Any:
    """Declare a flag as a dataclass field.

    ``help`` is the line that ``--help`` and docs/flags.md print. ``within`` is the range of valid values in
    mathematical notation, such as ``[0, 1)``; None is always valid where the type allows it. ``unit`` is the
    unit of the value. A ``secret`` flag is never printed or stored. An ``ignored`` flag is accepted without
    effect. Processes of a run may differ in a ``per_process`` flag without a warning.
    """
    metadata = {
        "help": help,
        "within": None if within is None else Range.parse(within),
        "unit": unit,
        "ignored": ignored,
        "per_process": per_process,
    }
    # Leave a secret out of repr: a traceback or a log line that shows the group then does not hold it.
    return field(default=default, repr=not secret, metadata=metadata)


def constraint(item: dataclasses.Field[Any]) -> str:
    """Return the range and the unit of a flag as text, such as ``> 0 seconds``; empty without both."""
    return " ".join(str(item.metadata[key]) for key in ("within", "unit") if item.metadata.get(key))


class Flags:
    """Base of the dataclasses of flags: checks ranges and choices when an object is made."""

    section: ClassVar[str]
    """Key of the group's section in a YAML file."""
    is_per_process: ClassVar[bool] = False
    """Whether processes of a run may differ in all flags of the group without a warning."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value outside its flag's range or choices.

        A text whose default is not empty may not be empty: it may come from an unset variable of a shell.
        """
        kind: Any = type(self)
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value, hint = getattr(self, item.name), _hints(kind)[item.name]
            if value is None or (value == "auto" and Auto in get_args(hint)):
                continue
            within = item.metadata.get("within")
            if within is not None:
                require(
                    value in within, f"--{item.name} is {value}", f"give a value {constraint(item).strip()}"
                )
            if isinstance(value, int | float) and value != math.inf:
                most = _largest(item, value)
                require(value <= most, f"--{item.name} is {value}: too large", f"give at most {most}")
            if get_origin(hint) is Literal:
                allowed = get_args(hint)
                require(value in allowed, f"--{item.name} is {value!r}", f"use one of {', '.join(allowed)}")
            require(
                value != "" or item.default == "", f"--{item.name} is empty", "give a value, or leave it out"
            )


def _largest(item: dataclasses.Field[Any], value: float) -> float:
    """Return the largest value of a flag that databases and clocks can hold."""
    if item.metadata.get("unit") in _SECONDS:
        return _LONGEST_SECONDS // _SECONDS[item.metadata["unit"]]
    return _LARGEST_INTEGER if isinstance(value, int) else math.inf


@cache
def _hints(group: type) -> Mapping[str, Any]:
    """Return the type of each flag of ``group``."""
    return get_type_hints(group)


def names_in(text: str | None) -> list[str]:
    """Return the names in a comma-separated text, each once."""
    return list(dict.fromkeys(filter(None, map(str.strip, (text or "").split(",")))))


@dataclass(frozen=True, kw_only=True)
class JsonFlags:
    """What is printed."""

    json: bool = flag(False, "print one JSON value on stdout; progress goes to stderr")


def require(condition: bool, message: str, hint: str) -> None:
    """Raise ConfigError unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message, hint=hint)


def require_plain_url(flag: str, url: str | None) -> None:
    """Raise ConfigError for a URL with a user, a password or a query: no request to an engine carries them.

    The message does not repeat them.
    """
    parts = urlsplit(url or "")
    require(
        "@" not in parts.netloc and not parts.query and not parts.fragment,
        f"--{flag} has a user, a password or a query in the URL of {parts.hostname}: no request carries them,"
        " and documents and logs name the URL",
        "give http://HOST:PORT of a server that needs none, such as the end of an SSH tunnel",
    )


def require_writable(flag: str, path: str | None) -> None:
    """Make the folder of a file that is written at the end, when a refusal would cost the work.

    Raises ConfigError for a file that cannot be written.
    """
    if path is None:
        return
    file, reason = Path(path), ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            reason = "it is a folder"
        # Ask instead of opening it for writing, which would empty a file that is there.
        elif not os.access(file if file.exists() else file.parent, os.W_OK):
            reason = "Permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    require(not reason, f"{flag} {path} cannot be written: {reason}", "give the path of a file")


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
        # Leave out what is not given: else a default would win over the value of a --config file.
        "default": argparse.SUPPRESS,
        "help": help_of(
            item, kind, None if changes.get("required") else changes.get("default", item.default)
        ),
        "metavar": kind_name(kind).upper() + ("|auto" if Auto in get_args(kind) else ""),
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
        options["type"] = _or_auto(plain) if Auto in get_args(kind) else plain
    parser.add_argument(f"--{item.name}", **(options | changes))
    if off is not None:
        parser.add_argument(
            f"--no_{item.name}", dest=item.name, action="store_const", const=off, default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )  # fmt: skip


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags by name as the words of a command line: lists with commas, mappings as JSON."""
    words = []
    for name, value in flags.items():
        is_json = value is None or isinstance(value, bool | Mapping)
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        words += [f"--{name}", json.dumps(value) if is_json else text]
    return words


def plain_type(kind: Any) -> Any:
    """Return the type of a flag without None and ``Auto``."""
    if get_origin(kind) is Literal or not get_args(kind):
        return kind
    (plain,) = (part for part in get_args(kind) if part not in (NoneType, Auto))
    return plain


def _or_auto(plain: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return what reads ``auto`` or a value of the type ``plain``."""

    def read(text: str) -> Any:
        return text if text == "auto" else plain(text)

    read.__name__ = f"{plain.__name__} or auto"  # argparse names it in its error
    return read


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
    # Double them: argparse fills help texts in by the operator %.
    return text.replace("%", "%%")


def _boolean(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in _TRUE


_collecting: ContextVar[bool] = ContextVar("agentrl_collects_parsers", default=False)


# Derive it from BaseException: a command's own `except Exception` must let it pass.
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
