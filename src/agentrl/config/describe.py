"""Describe the flags in docs/flags.md; ``python -m agentrl.config.describe`` prints it."""

from __future__ import annotations

import dataclasses
from typing import Any

from agentrl.config.flags import choices_of, constraint, kind_name
from agentrl.config.schema import GROUPS, Section, sections

_HEAD = """# Flags

本页只有英文版。[中文目录](zh/index.md)

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
    if choices_of(kind):
        return ", ".join(f"`{choice}`" for choice in choices_of(kind))
    return " ".join(filter(None, (kind_name(kind), constraint(item))))


if __name__ == "__main__":
    print(flags_page(), end="")
