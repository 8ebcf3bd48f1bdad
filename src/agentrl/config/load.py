"""Parse flags, a recipe and a YAML file into configuration dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import json
import logging
import math
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from agentrl.base.installation import shipped_files
from agentrl.base.validation import SettingsFile, SettingsModel, Text, read_settings
from agentrl.config.commands import examples_text
from agentrl.config.flags import Switch, add_flag, end_if_collected
from agentrl.config.sampling import SamplingConfig, TaskConfig
from agentrl.config.schema import GROUPS, RunConfig, sections
from agentrl.errors import ConfigError, nearest

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
            # Make new objects: the checks of ranges run when one is made.
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
    needs_run: bool = False,
) -> Configs:
    """Parse ``argv`` into every group of the schema and ``extra`` (groups of this command alone).

    ``--config FILE.yaml`` supplies values under the same names, flat or in sections; flags win. ``--recipe``
    supplies values too; both win over it. ``--help`` lists the groups ``shown`` and ``extra``. ``validate``
    checks the values against each other. A flag that has no effect logs a warning. Raises ConfigError on
    unknown flags or keys, on invalid values, and without a ``--run_name`` if the command ``needs_run``: a
    default would mix the trajectories of different models.
    """
    parser = _parser(command, description, shown, extra)
    end_if_collected(parser, command)
    groups = (*GROUPS, *extra)
    names = flag_names(*groups)
    words = ["--verbose" if word == "-v" else _underscored(word, names) for word in replace_flags(argv)]
    parsed, rest = parser.parse_known_args(words)
    if rest:
        what = "flag" if rest[0].startswith("-") else "argument"
        raise _unknown(what, rest[0].split("=")[0], [f"--{name}" for name in names])
    flags = vars(parsed)
    path = flags.pop("config", None)
    given = flags
    if path is not None:
        file = read_settings(path, what="--config", hint="write one 'flag: value' per line")
        given = {**flags_of(file, file.content or {}, groups), **flags}
    given = derive_flags(given)
    if given.get("recipe") is not None:
        given = {**derive_flags(read_recipe(given["recipe"]).flags), **given}
    configs = Configs.of(groups, given, given)
    if needs_run and "run_name" not in given:
        raise ConfigError(
            f"{command} needs --run_name, the name of the run",
            hint="a new name begins a run; agentrl runs lists those that there are",
        )
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


def _underscored(word: str, names: Sequence[str]) -> str:
    """Return ``--flag-name`` as ``--flag_name`` if it is one of the flags ``names``, else ``word``."""
    flag, joined, value = word.partition("=")
    key = flag.removeprefix("--").replace("-", "_")
    # Change known flags alone: the value of --engine_args has an engine's own, with hyphens.
    if flag.startswith("--") and (key in names or key.removeprefix("no_") in names):
        return f"--{key}{joined}{value}"
    return word


def _warn_of_ignored(configs: Configs) -> None:
    for group in configs:
        for item in dataclasses.fields(group):
            if item.metadata.get("ignored") and item.name in configs.given:
                logger.warning("--%s has no effect: %s", item.name, item.metadata["help"])


_RECIPE_HINT = "write source: TEXT, and below flags: one 'flag: value' per line (docs/losses.md)"
_FILES = (".yml", ".yaml", ".json")


@dataclass(frozen=True, kw_only=True)
class Recipe(SettingsModel):
    """The flags of a way to train or evaluate: of a paper, of another system, of the original."""

    name: str
    """What ``--recipe`` gives: a name in the shipped folder ``recipes``, or the path of a file."""
    source: Text
    """The paper, or the system with its files and commit."""
    flags: dict[str, Any]
    golden: float | None = None
    """The loss of ``STEP`` in tests/core/unit/losses/golden.py; None: there is none."""


def read_recipe(name: str) -> Recipe:
    """Return the recipe ``name``. Raises ConfigError for an unknown one and for what its file has wrong."""
    path = Path(name)
    if path.suffix not in _FILES:
        path = shipped_files() / "recipes" / f"{name}.yml"
        if not path.is_file():
            known = recipe_names()
            raise ConfigError(
                f"--recipe is {name}; choose one of {', '.join(known)}, or a YAML file such as ./mine.yml",
                hint=nearest(name, known) or "`agentrl recipes` lists them with their flags",
            )
    file = read_settings(path, what="--recipe", hint=_RECIPE_HINT)
    recipe = file.check(Recipe, file.content, name=name)
    flags = flags_of(file, recipe.flags, GROUPS, "flags")
    if "recipe" in flags:
        raise file.error("a recipe names no other recipe", "flags", "recipe", hint="copy its flags")
    return dataclasses.replace(recipe, flags=flags)


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes, sorted."""
    return sorted(file.stem for file in (shipped_files() / "recipes").glob("*.yml"))


def flags_of(file: SettingsFile, content: Any, groups: Sequence[type], *at: str) -> dict[str, Any]:
    """Return the flags in ``content``, which stands at ``at`` of a YAML file, by name, flat or in sections.

    Raises ConfigError, which names the line.
    """
    if not isinstance(content, dict):
        raise file.error("the file holds no mapping")
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
    names = {section.key: [item.name for item in section.flags] for section in sections(*groups)}
    found: dict[str, Any] = {}
    for place, name, value in _entries(file, content, names, at):
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
    file: SettingsFile, content: Mapping[Any, Any], names: Mapping[str, Sequence[str]], at: tuple[str, ...]
) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yield the place, the name and the value of each flag, flat or in one of the sections ``names``."""
    for key, value in content.items():
        if isinstance(value, dict):
            if key not in names:
                raise _unknown("section", str(key), list(names), file, *at, key)
            _require_in_section(file, value, names, *at, key)
            yield from (((*at, key, name), name, item) for name, item in value.items())
        # Pass over a section whose flags are all commented out: YAML reads it as null.
        elif key not in names or value is not None:
            yield (*at, key), key, value


def _require_in_section(
    file: SettingsFile, values: Mapping[Any, Any], names: Mapping[str, Sequence[str]], *at: Any
) -> None:
    """Raise ConfigError for a flag that does not belong to the section at ``at``, whose key is the last."""
    key = at[-1]
    for name in values:
        if name in names[key]:
            continue
        homes = [section for section, flags in names.items() if name in flags]
        if homes:
            raise file.error(
                f"{name} is not a flag of section {key}", *at, name, hint=f"move it to section {homes[0]}"
            )
        raise _unknown(f"key in section {key}:", str(name), names[key], file, *at, name)


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        is_text = isinstance(value, str) and value in get_args(hint)
        return is_text or (hint == Switch and isinstance(value, bool))
    if get_args(hint):
        return any(_fits(kind, value) for kind in get_args(hint))
    # Compare exact types: YAML's true is an int to isinstance.
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
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "see --help for the known ones"
    text = f"unknown {what} {name}"
    return ConfigError(text, hint=hint) if file is None else file.error(text, *place, hint=hint)


def leading_words(argv: Sequence[str], most: int) -> list[str]:
    """Return the words before the first flag, at most ``most``: names of runs, evaluations, tasks."""
    return list(itertools.takewhile(lambda word: not word.startswith("-"), argv[:most]))


def group_of(group: type[T], arguments: argparse.Namespace) -> T:
    """Return a dataclass of flags with those that ``arguments`` has. Raises ConfigError for a wrong value."""
    return _group(group, vars(arguments))


_INVALID_CHOICE: Final = re.compile(r"invalid choice: '(.+)' \(choose from (.+)\)")


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of commands with a few flags of their own; its errors are ConfigErrors."""

    def __init__(self, **kwargs: Any) -> None:
        # Take no abbreviations: argparse would read a misspelled --max_step as --max_steps.
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
        found = _INVALID_CHOICE.search(message)
        near = found and nearest(found[1], re.findall(r"[^\s',]+", found[2]))
        raise ConfigError(message, hint=near or f"see: {' '.join(words)} --help")

    def _all_parsers(self) -> list[argparse.ArgumentParser]:
        nested = [
            parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for parser in action.choices.values()
        ]
        return [self, *nested]


@dataclass(frozen=True, slots=True)
class Replacement:
    """What to use instead of a flag of the original."""

    use: str
    name: str | None = None
    """The flag here that takes its value; None if there is none."""
    harmless: Collection[str] | None = None
    """Values with which it can be left out, in lower case: others are refused. None: every value."""


_OFF = ("false", "0", "none", "")
PENALTIES = ("presence_penalty", "frequency_penalty")
_BATCHES = "use --groups_per_step and --max_tokens"
_PREFETCH = "the trainer reads the next step's data during a step"

REPLACEMENTS = {
    "accelerator_config": Replacement(_BATCHES),
    "activation_offloading": Replacement("use --activation_offload", "activation_offload"),
    "attention_implementation": Replacement("the trainer chooses attention by device and model"),
    "beta1": Replacement("use --ce_grpo_beta_1", "ce_grpo_beta_1"),
    "beta2": Replacement("use --ce_grpo_beta_2", "ce_grpo_beta_2"),
    "bf16": Replacement("products are in bfloat16 where that is fast; --autocast_bf16 decides otherwise"),
    "bypass_causal_mask_check": Replacement("masks are built from the data"),
    "compress_history": Replacement("use --new_context discard_all", harmless=_OFF),
    "cpu_ram_efficient_loading": Replacement("each process reads its own part of the weights"),
    "dataloader_drop_last": Replacement(_BATCHES),
    "dataloader_num_workers": Replacement(_PREFETCH),
    "dataloader_prefetch_factor": Replacement(_PREFETCH),
    "decoder_sparse_step": Replacement("the model's config.json decides it", harmless=_OFF),
    "dynamic_batching": Replacement("micro-batches are packed up to --max_tokens"),
    "enable_loss_parallel": Replacement("--loss_vocab_chunk_size bounds the memory of logits"),
    "enable_oss": Replacement("MongoDB stores images and large fields", harmless=_OFF),
    "eval_strategy": Replacement("use --eval_steps N and --eval_file", harmless=("no", *_OFF)),
    "inf_ep_size": Replacement("use --engine_args, with the engine's own flag", harmless=("1", *_OFF)),
    "log_entropy": Replacement("every step reports its entropy"),
    "logging_steps": Replacement("every step is reported"),
    "max_pixels": Replacement("the model's preprocessor_config.json limits the size of images"),
    "mcp_auth_token": Replacement(
        "export it as a variable, and name that: --mcp_auth_token_env", harmless=_OFF
    ),
    "oss_connection_string": Replacement("MongoDB stores images and large fields", harmless=_OFF),
    "output_router_logits": Replacement("no loss of a router is trained", harmless=_OFF),
    "pad_to_maximum": Replacement("forests are packed and not padded"),
    "remove_experience": Replacement("documents are kept; `agentrl db prune` deletes them", harmless=_OFF),
    "remove_unused_columns": Replacement("scorers and agents get every field of a task"),
    "save_only_model": Replacement("checkpoints hold the optimizer's state too, so that training resumes"),
    "shift_labels": Replacement("labels belong to the token before them", harmless=("true", "1")),
    "skip_non_positive_advantage": Replacement(
        "use --group_filter with a function that drops these trajectories", harmless=_OFF
    ),
    "top_k": Replacement("the sampled token's logprob is stored; --preferred_sampling_params has top_k"),
    "torch_dtype": Replacement(
        "weights are trained in float32 and published in the model's dtype; see --dtype"
    ),
    "trainer": Replacement("config.json in the model's folder names its class"),
    "tune_vision": Replacement("use --freeze with a regular expression", harmless=("true", "1")),
}
"""Flags that the original's scripts and configs.py have and AgentRL has not."""


def replace_flag(name: str, value: str) -> str | None:
    """Return the flag that takes ``value`` of the original's flag ``name``, or None to leave it out.

    Logs what to use. Raises ConfigError for a value that would change the run and has no flag here.
    """
    found = REPLACEMENTS[name]
    if found.harmless is not None and value.lower() not in found.harmless:
        shown = "" if name == "mcp_auth_token" else f" {value}"  # a secret
        raise ConfigError(f"--{name}{shown} is a flag of the original that is not taken here", hint=found.use)
    effect = f"is --{found.name} here" if found.name else "has no effect"
    logger.warning("--%s %s: %s", name, effect, found.use)
    return found.name


def replace_flags(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with the original's flags replaced or left out.

    ``--eval_strategy no`` leaves out ``--eval_steps`` too: there it has no effect, here it evaluates.
    """
    words: list[str] = []
    rest = list(argv)
    evaluates = True
    while rest:
        word = rest.pop(0)
        name, joined, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in REPLACEMENTS:
            words.append(word)
            continue
        if not joined:
            # Look for two hyphens: a value may be a negative number.
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        evaluates = evaluates and name != "eval_strategy"
        new = replace_flag(name, value)
        words += [f"--{new}", value] if new is not None else []
    return words if evaluates else _without(words, "--eval_steps")


def derive_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with the flags of ours that the original's flags among them stand for.

    ``--gradient_accumulation_steps`` times ``--per_device_train_batch_size`` are the trajectories of a step:
    the original's scripts split batches over the processes. Penalties become part of
    ``--preferred_sampling_params``. Raises ConfigError where the two ways to give a value disagree.
    """
    flags = dict(given)
    if (accumulated := flags.get("gradient_accumulation_steps")) is not None:
        rows = accumulated * (flags.get("per_device_train_batch_size") or 1)
        size = flags.get("num_generations", TaskConfig.num_generations)
        groups = math.ceil(rows / size) if min(rows, size) > 0 else 1  # their ranges refuse the rest
        if flags.setdefault("groups_per_step", groups) != groups:
            raise ConfigError(
                f"--gradient_accumulation_steps {accumulated} means {rows} trajectories a step, {groups}"
                f" groups of --num_generations {size}, and --groups_per_step is {flags['groups_per_step']}",
                hint="leave one of the two out",
            )
    penalties = {name: flags[name] for name in PENALTIES if flags.get(name) is not None}
    if penalties:
        text = flags.get("preferred_sampling_params", SamplingConfig.preferred_sampling_params)
        flags["preferred_sampling_params"] = _with_penalties(text, penalties)
    return flags


def _with_penalties(text: str, penalties: Mapping[str, float]) -> str:
    """Return the JSON ``text`` of sampling parameters with ``penalties``."""
    try:
        params = json.loads(text)
    except ValueError:
        return text  # refused where the parameters are read
    if not isinstance(params, dict):
        return text
    for name, value in penalties.items():
        if params.setdefault(name, value) != value:
            raise ConfigError(
                f"--{name} is {value:g}, and --preferred_sampling_params has {name} {params[name]}",
                hint="leave one of the two out",
            )
    return json.dumps(params)


def _without(words: list[str], flag: str) -> list[str]:
    """Return ``words`` without ``flag`` and its value."""
    kept = [word for word in words if not word.startswith(f"{flag}=")]
    while flag in kept:
        place = kept.index(flag)
        del kept[place : place + 2]
    return kept
