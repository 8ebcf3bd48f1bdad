"""Flags and a YAML file → configuration dataclasses; what is unknown is an error that names the nearest."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml

from agentrl.config.schema import GROUPS
from agentrl.errors import ConfigError

T = TypeVar("T")


class Configs:
    """The parsed groups; ``configs[LossConfig]`` is the group."""

    def __init__(self, groups: Sequence[Any], given: Iterable[str] = ()) -> None:
        """``given`` are the flags that were given, not left at their defaults."""
        self._groups = {type(group): group for group in groups}
        self.given = frozenset(given)

    def __iter__(self) -> Iterator[Any]:
        """Yield every group."""
        return iter(self._groups.values())

    def __getitem__(self, cls: type[T]) -> T:
        return cast("T", self._groups[cls])


def parse(
    argv: Sequence[str],
    *,
    command: str,
    description: str,
    shown: Sequence[type],
    extra: Sequence[type] = (),
    validate: Callable[[Configs], None] | None = None,
) -> Configs:
    """Parse ``argv`` into every group of the schema and ``extra`` (groups of this command alone).

    ``--config FILE.yaml`` supplies values under the same names; flags win. ``--help`` lists the groups
    ``shown`` and ``extra``. ``validate`` checks the values against each other. Raises ConfigError on unknown
    flags or keys and on values of a wrong type.
    """
    from transformers.hf_argparser import HfArgumentParser

    groups = (*GROUPS, *extra)
    if any(word in ("-h", "--help") for word in argv):
        _print_help(command, description, (*extra, *shown))
    parser = _parser(HfArgumentParser, groups, command)
    defaults, argv = _take_config_file(argv, groups)
    parser.set_defaults(**defaults)
    for action in parser._actions:
        if action.dest in defaults:
            action.required = False
    parsed = parser.parse_args_into_dataclasses(
        list(argv), return_remaining_strings=True, look_for_args_file=False
    )
    *values, remaining = parsed
    if remaining:
        what = "flag" if remaining[0].startswith("-") else "argument"
        raise _unknown(what, remaining[0].split("=")[0], [f"--{name}" for name in _names(groups)])
    words = {word.lstrip("-").partition("=")[0] for word in argv if word.startswith("--")}
    configs = Configs(values, words & set(_names(groups)) | set(defaults))
    if validate is not None:
        validate(configs)
    return configs


def _parser(base: Any, groups: Sequence[type], command: str) -> Any:
    class Parser(_flag_parser(base)):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(message, hint=f"see: {command} --help")

    parser = Parser(groups, prog=command, add_help=False, allow_abbrev=False)
    _add_bare_switches(parser, groups)
    return parser


def _flag_parser(base: Any) -> Any:
    """Return ``base``, an HfArgumentParser, as one that accepts the metadata of flags."""

    class FlagParser(base):  # type: ignore[misc]
        @staticmethod
        def _parse_dataclass_field(parser: Any, item: dataclasses.Field[Any]) -> None:
            plain = copy.copy(item)
            plain.metadata = MappingProxyType({"help": item.metadata["help"]})
            base._parse_dataclass_field(parser, plain)

    return FlagParser


def _add_bare_switches(parser: Any, groups: Sequence[type]) -> None:
    """Accept ``--name`` and ``--no_name`` for flags of type ``bool | None``, as for flags of type bool."""
    optional = {
        name for group in groups for name, hint in get_type_hints(group).items() if hint == (bool | None)
    }
    for action in list(parser._actions):
        if action.dest in optional:
            action.nargs, action.const = "?", True
            parser.add_argument(f"--no_{action.dest}", action="store_false", dest=action.dest, default=None)


def _print_help(command: str, description: str, groups: Sequence[type]) -> NoReturn:
    from transformers.hf_argparser import HfArgumentParser

    shown = _flag_parser(HfArgumentParser)(
        cast("Any", list(groups)),
        prog=command,
        usage=f"{command} [--config FILE.yaml] [--flag VALUE …]",
        description=description,
        epilog="Flags of the other commands of the run are accepted too, so that one set of flags, or one"
        " --config file with the same names, serves every process of a run.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    shown.print_help()
    raise SystemExit(0)


def _take_config_file(argv: Sequence[str], groups: Sequence[type]) -> tuple[dict[str, Any], list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        known, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error), hint="--config takes the path of a YAML file") from error
    if known.config is None:
        return {}, rest
    return _read_yaml(Path(known.config), groups), rest


def _read_yaml(path: Path, groups: Sequence[type]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(
            f"--config {path} cannot be read: {error.strerror}", hint="give an existing file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"--config {path} is not YAML: {error}", hint="mend the line that it names"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8 text: {error}", hint="save it as UTF-8") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} holds no mapping", hint="write one 'flag: value' a line")
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
    for key, value in content.items():
        if key not in hints:
            raise _unknown(f"key in {path}:", str(key), _names(groups))
        if not _fits(hints[key], value):
            raise ConfigError(
                f"{path}: {key} is {value!r} ({type(value).__name__}), and it takes {_describe(hints[key])}",
                hint="mind YAML's types: 1e-6 without a dot is text, write 1.0e-6",
            )
    return content


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_args(hint):
        return any(_fits(kind, value) for kind in get_args(hint))
    return type(value) is hint or (type(value) is int and hint is float)


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_args(hint):
        return " or ".join(_describe(kind) for kind in get_args(hint))
    return "null" if hint is NoneType else str(hint.__name__)


def _names(groups: Sequence[type]) -> list[str]:
    return [field.name for group in groups for field in dataclasses.fields(group)]


def _unknown(what: str, name: str, known: Sequence[str]) -> ConfigError:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else "see --help for the known ones"
    return ConfigError(f"unknown {what} {name}", hint=hint)


def argv_or_system(argv: Sequence[str] | None) -> list[str]:
    """The arguments of a command that may be called from Python or from the shell."""
    return list(sys.argv[1:] if argv is None else argv)


class CommandParser(argparse.ArgumentParser):
    """An argparse parser for commands with a few flags of their own; its errors are ConfigErrors."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; an unknown flag is an error that names the nearest one."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            known = [option for parser in self._all_parsers() for option in parser._option_string_actions]
            raise _unknown("argument", rest[0].split("=")[0], known)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process."""
        raise ConfigError(message, hint=f"see: {self.prog} --help")

    def _all_parsers(self) -> list[argparse.ArgumentParser]:
        nested = [
            parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for parser in action.choices.values()
        ]
        return [self, *nested]
