"""Parse flags and a YAML file into configuration dataclasses."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml

from agentrl.config.collect_parser import CollectedParser, collecting, flags_parser
from agentrl.config.examples import examples_text
from agentrl.config.fields import Switch
from agentrl.config.original import REPLACEMENTS, replace_flag, replace_flags
from agentrl.config.schema import GROUPS, sections
from agentrl.errors import ConfigError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Configs:
    """The parsed groups of flags; ``configs[LossConfig]`` is one of them."""

    def __init__(self, groups: Sequence[Any], given: Iterable[str] = ()) -> None:
        """``given`` names the flags that were given; the others have their defaults."""
        self._groups = {type(group): group for group in groups}
        self.given = frozenset(given)

    def only(self, *groups: type) -> Configs:
        """Return the configuration with ``groups`` alone, and the flags of theirs that were given."""
        return Configs([self._groups[group] for group in groups], self.given & set(_names(groups)))

    def with_flags(self, values: Mapping[str, Any]) -> Configs:
        """Return a copy in which the flags ``values`` were given too, by name."""
        groups = [
            dataclasses.replace(
                group, **{name: values[name] for name in _names([type(group)]) if name in values}
            )
            for group in self
        ]
        return Configs(groups, self.given | set(values))

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

    ``--config FILE.yaml`` supplies values under the same names, flat or in sections; flags win. ``--help``
    lists the groups ``shown`` and ``extra``. ``validate`` checks the values against each other. A flag that
    has no effect logs a warning. Raises ConfigError on unknown flags or keys and on invalid values.
    """
    if collecting():
        raise CollectedParser(flags_parser(command, shown, extra), command)
    if any(word in ("-h", "--help") for word in argv):
        from agentrl.config.describe import help_text

        print(help_text(command, description, (*extra, *shown)))
        raise SystemExit(0)
    argv = ["--verbose" if word == "-v" else word for word in argv]
    groups = (*GROUPS, *extra)
    parser = _parser(groups, command)
    defaults, argv = _take_config_file(argv, groups)
    argv = replace_flags(argv)
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
    words = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    words |= {word.removeprefix("no_") for word in words}
    configs = Configs(values, words & set(_names(groups)) | set(defaults))
    _warn_of_ignored(configs)
    if validate is not None:
        validate(configs)
    return configs


def _parser(groups: Sequence[type], command: str) -> Any:
    from transformers.hf_argparser import HfArgumentParser

    class Parser(HfArgumentParser):
        """Raises ConfigError, and accepts the metadata of ``fields.flag``."""

        def error(self, message: str) -> NoReturn:
            raise ConfigError(message, hint=f"see: {command} --help")

        @staticmethod
        def _parse_dataclass_field(parser: Any, field: dataclasses.Field[Any]) -> None:
            plain = copy.copy(field)
            plain.metadata = MappingProxyType({"help": field.metadata["help"]})
            HfArgumentParser._parse_dataclass_field(parser, plain)

    parser = Parser(cast("Any", groups), prog=command, add_help=False, allow_abbrev=False)
    _add_bare_switches(parser, groups)
    return parser


def _add_bare_switches(parser: Any, groups: Sequence[type]) -> None:
    """Accept ``--name`` and ``--no_name`` for ``bool | None`` and ``Switch``, as for flags of type bool."""
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
    for action in list(parser._actions):
        hint = hints.get(action.dest)
        if hint == (bool | None):
            action.nargs, action.const = "?", True
            parser.add_argument(f"--no_{action.dest}", action="store_false", dest=action.dest, default=None)
        elif hint == Switch:
            action.nargs, action.const, action.type = "?", "true", str.lower
            parser.add_argument(
                f"--no_{action.dest}", action="store_const", const="false", dest=action.dest,
                default=argparse.SUPPRESS,
            )  # fmt: skip


def _warn_of_ignored(configs: Configs) -> None:
    for group in configs:
        for item in dataclasses.fields(group):
            if item.metadata.get("ignored") and item.name in configs.given:
                logger.warning("--%s has no effect: %s", item.name, item.metadata["help"])


def _take_config_file(argv: Sequence[str], groups: Sequence[type]) -> tuple[dict[str, Any], list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        known, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error), hint="--config takes the path of a YAML file") from error
    if known.config is None:
        return {}, rest
    path = Path(known.config)
    return _read_flags(path, _read_yaml(path), groups), rest


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(
            f"--config {path} cannot be read: {error.strerror}", hint="give an existing file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"--config {path} is not YAML: {error}", hint="correct the line that it names"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8 text: {error}", hint="save it as UTF-8") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} holds no mapping", hint="write one 'flag: value' per line")
    return content


def _read_flags(path: Path, content: Mapping[Any, Any], groups: Sequence[type]) -> dict[str, Any]:
    """Return the flags of a YAML file by name, flat or in sections; ConfigError for an invalid one."""
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
    names = {section.key: [item.name for item in section.flags] for section in sections(*groups)}
    found: dict[str, Any] = {}
    for key, value in content.items():
        where = f"key in {path}:"
        if isinstance(value, dict):
            if key not in names:
                raise _unknown(f"section in {path}:", str(key), list(names))
            _require_in_section(path, key, value, names)
            given = value
        elif key in names and value is None:
            continue
        else:
            given = {key: value}
        for name, item in given.items():
            if name not in hints and name in REPLACEMENTS:
                text = str(item).lower() if isinstance(item, bool) or item is None else str(item)
                name = replace_flag(name, text)
                if name is None:
                    continue
            if name not in hints:
                raise _unknown(where, str(name), [*_names(groups), *names])
            if name in found:
                raise ConfigError(f"{path}: {name} is given twice", hint="leave one of them out")
            if not _fits(hints[name], item):
                raise ConfigError(
                    f"{path}: {name} is {item!r} ({type(item).__name__}), and it takes"
                    f" {_describe(hints[name])}",
                    hint="mind YAML's types: 1e-6 without a dot is text, write 1.0e-6",
                )
            found[name] = str(item).lower() if hints[name] == Switch else item
    return found


def _require_in_section(
    path: Path, key: str, values: Mapping[Any, Any], names: Mapping[str, Sequence[str]]
) -> None:
    """Raise ConfigError for a flag that does not belong to section ``key``."""
    for name in values:
        if name in names[key]:
            continue
        homes = [section for section, flags in names.items() if name in flags]
        if homes:
            raise ConfigError(
                f"{path}: {name} is not a flag of section {key}", hint=f"move it to section {homes[0]}"
            )
        raise _unknown(f"key in section {key} of {path}:", str(name), names[key])


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        is_text = isinstance(value, str) and value in get_args(hint)
        return is_text or (hint == Switch and isinstance(value, bool))
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


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of commands with a few flags of their own; its errors are ConfigErrors."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.epilog = examples_text(self.prog)
        self.formatter_class = argparse.RawDescriptionHelpFormatter

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; an unknown flag raises ConfigError with the nearest known one."""
        if collecting():
            raise CollectedParser(self, self.prog)
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            known = [option for parser in self._all_parsers() for option in parser._option_string_actions]
            raise _unknown("argument", rest[0].split("=")[0], known)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError; argparse would end the process."""
        raise ConfigError(message, hint=f"see: {self.prog} --help")

    def _all_parsers(self) -> list[argparse.ArgumentParser]:
        nested = [
            parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for parser in action.choices.values()
        ]
        return [self, *nested]
