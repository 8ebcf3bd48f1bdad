"""Describe the flags: ``--help``, and docs/flags.md (``python -m agentrl.config.describe`` prints it)."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from agentrl.config.examples import examples_text
from agentrl.config.fields import constraint
from agentrl.config.schema import GROUPS, Section, sections

_WIDTH = 110
_FLAG_COLUMN = 36

_HEAD = """# Flags

Every process of a run accepts every flag below and reads those it needs, so one set of flags, or one YAML
file with the same names (`--config run.yml`; flags win), serves a whole run. In the file, flags may be
grouped in sections with the keys below, or stand flat:

```yaml
run_name: math
loss:
  loss_calculater: GSPO
parallel:
  tp_size: 2
```

An unknown flag, section or key is an error that names the nearest known one. A value outside the range of its
flag is refused at start. `python -m agentrl.config.describe > docs/flags.md` writes this page.
"""


def flags_page() -> str:
    """Return docs/flags.md: a table per section."""
    return "\n".join([_HEAD, *(_table(section) for section in sections(*GROUPS))])


def help_text(command: str, description: str, groups: Sequence[type]) -> str:
    """Return the text of ``--help``: the flags of ``groups`` by section, and two examples."""
    parser = argparse.ArgumentParser(
        prog=command,
        usage=f"{command} [--config FILE.yaml] [--flag VALUE …]",
        description=description,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=_FLAG_COLUMN, width=_WIDTH
        ),
    )
    for section in sections(*groups):
        group = parser.add_argument_group(f"{section.title} [{section.key}]")
        for item in section.flags:
            kind = section.types[item.name]
            group.add_argument(f"--{item.name}", metavar=_kind(kind).upper(), help=_help(item, kind))
    end = textwrap.fill(
        "The names in brackets are the sections of a --config file. Flags of the run's other commands are"
        " accepted too, so that one set of flags, or one file, serves every process of a run.",
        _WIDTH,
    )
    return "\n".join([parser.format_help(), end, "", examples_text(command)])


def _table(section: Section) -> str:
    lines = [
        f"## {section.title}",
        "",
        f"Section `{section.key}:`.",
        "",
        "| flag | value | default | meaning |",
        "|---|---|---|---|",
    ]
    for item in section.flags:
        default = "" if item.default in (None, "") else f"`{item.default}`"
        meaning = str(item.metadata["help"]).replace("|", "\\|")
        lines.append(
            f"| `--{item.name}` | {_value(item, section.types[item.name])} | {default} | {meaning} |"
        )
    return "\n".join(lines) + "\n"


def _value(item: dataclasses.Field[Any], kind: Any) -> str:
    """Return the choices of a flag, or its type with range and unit."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    return " ".join(filter(None, (_kind(kind), constraint(item))))


def _help(item: dataclasses.Field[Any], kind: Any) -> str:
    """Return the help text with range, unit, choices and default."""
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    notes = [", ".join(choices), constraint(item)]
    if item.default not in (None, "", dataclasses.MISSING, ...):
        notes.append(f"default: {item.default}")
    ending = "; ".join(filter(None, notes))
    text = f"{item.metadata['help']} ({ending})" if ending else str(item.metadata["help"])
    return text.replace("%", "%%")


def _kind(kind: Any) -> str:
    """Return the name of the type of a flag, without None."""
    if get_origin(kind) is Literal:
        return "name"
    (plain,) = [part for part in get_args(kind) or (kind,) if part is not NoneType]
    return "text" if plain is str else str(plain.__name__)


if __name__ == "__main__":
    print(flags_page(), end="")
