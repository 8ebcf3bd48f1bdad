"""Parse flags and a YAML file into configuration dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import logging
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from agentrl.config.arguments import add_flag, end_if_collected
from agentrl.config.commands import examples_text
from agentrl.config.flags import Switch
from agentrl.config.original import REPLACEMENTS, derive_flags, replace_flag, replace_flags
from agentrl.config.schema import GROUPS, RunConfig, sections
from agentrl.errors import ConfigError
from agentrl.settings_file import SettingsFile, read_settings

T = TypeVar("T")

logger = logging.getLogger(__name__)

_WIDTH = 110
"""Columns of a help text at most; a narrower terminal shows fewer."""


class Configs:
    """The parsed groups of flags; ``configs[LossConfig]`` is one of them."""

    def __init__(self, groups: Sequence[Any], given: Iterable[str] = ()) -> None:
        """``given`` names the flags that were given; the others have their defaults."""
        self._groups = {type(group): group for group in groups}
        self.given = frozenset(given)

    @classmethod
    def of(cls, groups: Sequence[type], values: Mapping[str, Any], given: Iterable[str]) -> Configs:
        """Return ``groups`` with the flags ``values``, by name; the others have their defaults."""
        return cls([_group(group, values) for group in groups], given)

    @property
    def flags(self) -> dict[str, Any]:
        """The value of every flag, by name."""
        return {name: getattr(group, name) for group in self for name in flag_names(type(group))}

    def only(self, *groups: type) -> Configs:
        """Return the configuration with ``groups`` alone, and the flags of theirs that were given."""
        return Configs([self._groups[group] for group in groups], self.given & set(flag_names(*groups)))

    def with_flags(self, values: Mapping[str, Any]) -> Configs:
        """Return a copy in which the flags ``values`` were given too, by name."""
        groups = [
            dataclasses.replace(
                group, **{name: values[name] for name in flag_names(type(group)) if name in values}
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
    parser = _parser(command, description, shown, extra)
    end_if_collected(parser, command)
    groups = (*GROUPS, *extra)
    known = [f"--{name}" for name in flag_names(*groups)]
    words = ["--verbose" if word == "-v" else _underscored(word, known) for word in replace_flags(argv)]
    parsed, rest = parser.parse_known_args(words)
    if rest:
        what = "flag" if rest[0].startswith("-") else "argument"
        raise _unknown(what, rest[0].split("=")[0], known)
    flags = vars(parsed)
    path = flags.pop("config", None)
    given = flags
    if path is not None:
        file = read_settings(path, what="--config", hint="write one 'flag: value' per line")
        given = {**flags_of(file, file.content or {}, groups), **flags}
    given = derive_flags(given)
    configs = Configs.of(groups, given, given)
    _warn_of_ignored(configs)
    if validate is not None:
        validate(configs)
    return configs


def _parser(command: str, description: str, shown: Sequence[type], extra: Sequence[type]) -> CommandParser:
    """Return a parser with every flag; those of groups that are not ``shown`` are hidden."""
    end = (
        "The names in brackets are the sections of a --config file. Flags of the run's other commands are"
        " accepted too, so that one set of flags, or one file, serves every process of a run."
    )
    parser = CommandParser(
        prog=command, usage=f"{command} [--config FILE.yaml] [--flag VALUE …]", description=description
    )  # fmt: skip
    parser.epilog = f"{textwrap.fill(end, _columns())}\n\n{parser.epilog}"
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file of flags")
    known = set[str]()
    for groups, is_shown in (((*extra, *shown), True), (GROUPS, False)):
        for section in sections(*groups):
            container = parser.add_argument_group(f"{section.title} [{section.key}]")
            for item in section.flags:
                if item.name not in known:
                    hidden = {} if is_shown else {"help": argparse.SUPPRESS}
                    add_flag(container, item, section.types[item.name], **hidden)
                    known.add(item.name)
    return parser


def _columns() -> int:
    """Return the columns of a help text."""
    return min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns)


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_columns() // 3, width=_columns())


def _underscored(word: str, known: Sequence[str]) -> str:
    """Return ``--flag-name`` as ``--flag_name``, if it is a flag."""
    name, joined, value = word.partition("=")
    flag = "--" + name.removeprefix("--").replace("-", "_")
    is_flag = name.startswith("--") and (flag in known or flag.replace("--no_", "--", 1) in known)
    return flag + joined + value if is_flag else word


def _warn_of_ignored(configs: Configs) -> None:
    for group in configs:
        for item in dataclasses.fields(group):
            if item.metadata.get("ignored") and item.name in configs.given:
                logger.warning("--%s has no effect: %s", item.name, item.metadata["help"])


def flags_of(file: SettingsFile, content: Any, groups: Sequence[type]) -> dict[str, Any]:
    """Return the flags in ``content`` of a YAML file by name, flat or in sections. Raises ConfigError."""
    if not isinstance(content, dict):
        raise file.error("the file holds no mapping")
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
    names = {section.key: [item.name for item in section.flags] for section in sections(*groups)}
    found: dict[str, Any] = {}
    for place, name, value in _entries(file, content, names):
        if name not in hints and name in REPLACEMENTS:
            text = str(value).lower() if isinstance(value, bool) or value is None else str(value)
            name = replace_flag(name, text)
            if name is None:
                continue
        if name not in hints:
            raise _unknown("key", str(name), [*flag_names(*groups), *names], file, *place)
        if name in found:
            raise file.error(f"{name} is given twice", *place, hint="leave one of them out")
        if not _fits(hints[name], value):
            raise file.error(
                f"{name} is {value!r} ({type(value).__name__}), and it takes {_describe(hints[name])}",
                *place,
                hint="mind YAML's types: 1e-6 without a dot is text, write 1.0e-6",
            )
        found[name] = str(value).lower() if hints[name] == Switch else value
    return found


def _entries(
    file: SettingsFile, content: Mapping[Any, Any], names: Mapping[str, Sequence[str]]
) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yield the place, the name and the value of each flag, flat or in one of the sections ``names``."""
    for key, value in content.items():
        if isinstance(value, dict):
            if key not in names:
                raise _unknown("section", str(key), list(names), file, key)
            _require_in_section(file, key, value, names)
            yield from (((key, name), name, item) for name, item in value.items())
        elif key not in names or value is not None:
            yield (key,), key, value


def _require_in_section(
    file: SettingsFile, key: str, values: Mapping[Any, Any], names: Mapping[str, Sequence[str]]
) -> None:
    """Raise ConfigError for a flag that does not belong to section ``key``."""
    for name in values:
        if name in names[key]:
            continue
        homes = [section for section, flags in names.items() if name in flags]
        if homes:
            raise file.error(
                f"{name} is not a flag of section {key}", key, name, hint=f"move it to section {homes[0]}"
            )
        raise _unknown(f"key in section {key}:", str(name), names[key], file, key, name)


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


def flag_names(*groups: type) -> list[str]:
    """Return the names of the flags of ``groups``, in order."""
    return [item.name for group in groups for item in dataclasses.fields(group)]


def _group(group: type[T], values: Mapping[str, Any]) -> T:
    return group(**{name: values[name] for name in flag_names(group) if name in values})


def _unknown(
    what: str, name: str, known: Sequence[str], file: SettingsFile | None = None, *place: Any
) -> ConfigError:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else "see --help for the known ones"
    text = f"unknown {what} {name}"
    return ConfigError(text, hint=hint) if file is None else file.error(text, *place, hint=hint)


def leading_words(argv: Sequence[str], most: int) -> list[str]:
    """Return the words before the first flag, at most ``most``: names of runs, evaluations, tasks."""
    return list(itertools.takewhile(lambda word: not word.startswith("-"), argv[:most]))


def group_of(group: type[T], arguments: argparse.Namespace) -> T:
    """Return a dataclass of flags with those that ``arguments`` has. Raises ConfigError for a wrong value."""
    return _group(group, vars(arguments))


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of commands with a few flags of their own; its errors are ConfigErrors."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.description = textwrap.fill(self.description or "", _columns())
        self.epilog = examples_text(self.prog)
        self.formatter_class = _Help

    def add_flags(self, group: type, *names: str, **changes: Any) -> None:
        """Add flags of a dataclass, all without ``names``; ``changes`` are arguments of ``add_argument``."""
        for section in sections(group):
            for item in section.flags:
                if not names or item.name in names:
                    options = {"default": item.default, **changes}
                    add_flag(self, item, section.types[item.name], **options)

    def add_database(self, **changes: Any) -> None:
        """Add the flags that name a server, with a longer timeout: for commands that read or change much."""
        self.add_flags(RunConfig, "db_connection_string", "mongo_dir", **changes)
        self.add_flags(RunConfig, "db_timeout_seconds", **{"default": 30.0, **changes})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; an unknown flag raises ConfigError with the nearest known one."""
        end_if_collected(self, self.prog)
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            known = [option for parser in self._all_parsers() for option in parser._option_string_actions]
            raise _unknown("argument", rest[0].split("=")[0], known)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError; argparse would end the process."""
        words = [word for word in self.prog.split() if word.islower()]  # agentrl whatif RUN [NEW]
        raise ConfigError(message, hint=f"see: {' '.join(words)} --help")

    def _all_parsers(self) -> list[argparse.ArgumentParser]:
        nested = [
            parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for parser in action.choices.values()
        ]
        return [self, *nested]
