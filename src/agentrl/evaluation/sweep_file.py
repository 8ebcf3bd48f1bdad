"""Read the file of ``agentrl sweep``: the parent, its steps, the settings, the seeds and the evaluation."""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config.arguments import flag_words
from agentrl.config.load import parse
from agentrl.config.run import DATABASE_FLAGS, RunConfig
from agentrl.config.whatif import WhatIfConfig, check_flags
from agentrl.errors import ConfigError, Place
from agentrl.losses.settings import LossSettings
from agentrl.settings_file import SettingsFile, read_settings
from agentrl.validation import Count, PlainText, PositiveWhole, Settings, Text, broken

_HINT = "a sweep has name, run, settings or grid, and may have steps, seeds, eval, min_seeds and launch"
_OF_SWEEP = frozenset({
    "steps", "order_seed", "compare", "out", "run_name", "output_dir", "log_dir", "config", "eval_file",
    "eval_samples", "eval_version", "eval_model", "eval_steps", "eval_label", *DATABASE_FLAGS,
})  # fmt: skip
"""Flags that the sweep gives to its commands."""
_FILES = frozenset({".json", ".jsonl", ".parquet", ".csv"})
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class HeldOut(Settings):
    """What judges the settings: ``agentrl eval`` of each child's last weights."""

    file: Text
    samples: PositiveWhole = 1
    """Trajectories per task."""
    flags: dict[str, PlainText] = field(default_factory=dict)
    """Flags of ``agentrl eval``; the others are those of the parent's engines and samplers."""

    @property
    def label(self) -> str:
        """Return the label of the evaluations of this file with these flags."""
        path = Path(self.file)
        content = path.read_bytes() if path.is_file() else self.file.encode()
        return f"sweep-{_digest(content + _text({**self.flags, 'samples': str(self.samples)}))}"


@dataclass(frozen=True)
class Setting:
    """Flags of ``agentrl whatif`` that differ from the parent's."""

    flags: Mapping[str, str]

    @property
    def id(self) -> str:
        """Return a hash of the flags."""
        return _digest(_text(self.flags))

    @property
    def shown(self) -> str:
        """``loss_calculater GSPO, learning_rate 1e-06``."""
        return ", ".join(f"{name} {value}" for name, value in self.flags.items()) or "as the parent"


@dataclass(frozen=True, kw_only=True)
class Sweep(Settings):
    """The content of the file."""

    name: Text
    run: Text
    """The parent."""
    steps: PlainText | None = None
    """The parent's steps that are trained again, such as 40-60; None: all that it has at the beginning."""
    seeds: tuple[Count, ...] = (0,)
    """Of the order of the steps; 0 is the parent's order."""
    settings: tuple[dict[str, PlainText], ...] = ()
    grid: dict[str, tuple[PlainText, ...]] = field(default_factory=dict)
    """Flag → values: every combination is a setting."""
    eval: HeldOut | None = None
    min_seeds: PositiveWhole = 2
    """Rounds before a setting may be stopped."""
    launch: Text | None = None
    """Command line that stands for ``agentrl`` in what-ifs: accelerate launch … -m agentrl."""

    def __post_init__(self) -> None:
        """Raise an error for rules that concern several values."""
        if not self.all:
            raise broken("names no setting", hint="give settings: a list of flags; or grid: flag: [values]")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise broken(f"is {list(self.seeds)}; seeds must differ", "seeds", hint="such as [0, 1, 2]")
        for name, values in self.grid.items():
            if not values:
                raise broken("has no value", "grid", name, hint="give at least one")
        found: dict[str, Setting] = {}
        for setting in self.all:
            if setting.id in found:
                raise broken(f"has the setting '{setting.shown}' twice", hint="leave one out")
            found[setting.id] = setting

    @property
    def all(self) -> list[Setting]:
        """The settings: those of the list, then every combination of the grid."""
        combined = itertools.product(*self.grid.values()) if self.grid else ()
        grid = [Setting(dict(zip(self.grid, values, strict=True))) for values in combined]
        return [*map(Setting, self.settings), *grid]

    def child(self, setting: Setting, seed: int) -> str:
        """Return the name of the run of a setting and a seed."""
        trained = _digest(_text({**setting.flags, "steps": self.steps or ""}))
        return f"{self.run}_{self.name}_{trained}_{seed}"


def read_sweep(path: Path) -> Sweep:
    """Read and check a file: every flag of every setting, and the names of the children.

    A path in ``eval.file`` is relative to the file. Raises ConfigError, which names the line.
    """
    file = read_settings(path, hint=_HINT)
    content = file.content
    held_out = content.get("eval") if isinstance(content, dict) else None
    if isinstance(held_out, dict) and isinstance(held_out.get("file"), str):
        beside = path.parent / held_out["file"]
        if beside.is_file():
            held_out["file"] = str(beside)
        elif Path(held_out["file"]).suffix in _FILES and not Path(held_out["file"]).is_file():
            raise file.error(
                f"eval.file names no file: {held_out['file']!r}", "eval", "file",
                hint=f"give a task file, relative to {path.parent} or to here",
            )  # fmt: skip
    sweep = file.check(Sweep, content)
    _check_name(file, sweep)
    _check(file, {} if sweep.steps is None else {"steps": sweep.steps}, is_own=True)
    for place, setting in _places(sweep):
        _check(file, setting.flags, *place)
    if sweep.eval is not None:
        _check(file, sweep.eval.flags, "eval", "flags", command="agentrl eval")
    return sweep


def _places(sweep: Sweep) -> Iterator[tuple[Place, Setting]]:
    listed = len(sweep.settings)
    for index, setting in enumerate(sweep.all):
        yield ("settings", index) if index < listed else ("grid",), setting


def _check_name(file: SettingsFile, sweep: Sweep) -> None:
    for setting, seed in itertools.product(sweep.all, sweep.seeds):
        try:
            RunConfig(run_name=sweep.child(setting, seed))
        except ConfigError as error:
            raise file.error(
                f"name is {sweep.name!r}, and a child would be {sweep.child(setting, seed)!r}: run names have"
                " at most 48 letters, digits, _ and -",
                "name", hint="give a shorter name",
            ) from error  # fmt: skip


def _check(
    file: SettingsFile, flags: Mapping[str, str], *place: str | int,
    command: str = "agentrl whatif", is_own: bool = False,
) -> None:  # fmt: skip
    """Raise ConfigError for a flag or a value that ``command`` refuses."""
    for name in flags if not is_own else ():
        if name in _OF_SWEEP:
            raise file.error(f"--{name} is given by the sweep", *place, name, hint="leave it out")
    is_whatif = command == "agentrl whatif"
    try:
        found = parse(
            flag_words(flags), command=command, description="", shown=(),
            extra=(WhatIfConfig,) if is_whatif else (),
        )  # fmt: skip
        if is_whatif:
            check_flags(found)
            _ = LossSettings.of_run(found).loss
    except ConfigError as error:
        said = f"{error.message} "
        named = next(
            (name for name, value in flags.items() if f"--{name} " in said or repr(value) in said), None
        )
        where = place if named is None else (*place, named)
        raise file.error(error.message, *where, hint=error.hint) from error


def launch_words(sweep: Sweep, default: list[str]) -> list[str]:
    """Return the words that stand for ``agentrl`` in what-ifs."""
    return default if sweep.launch is None else shlex.split(sweep.launch)


def _text(flags: Mapping[str, str]) -> bytes:
    return json.dumps(flags, sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
