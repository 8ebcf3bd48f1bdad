"""``python -m agentrl.config.describe`` prints docs/flags.md from the schema."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from agentrl.config.schema import GROUPS

_HEAD = """# Flags

Every process of a run accepts every flag below and reads those it needs, so one set of flags, or one YAML
file with the same names (`--config run.yml`; flags win), serves a whole run. An unknown flag or key is an
error that names the nearest known one. `python -m agentrl.config.describe > docs/flags.md` writes this page.
"""


def flags_page() -> str:
    """The page as Markdown: a table per group."""
    return "\n".join([_HEAD, *(_table(group) for group in GROUPS)])


def _table(group: type) -> str:
    summary = (group.__doc__ or "").splitlines()[0].rstrip(".")
    hints = get_type_hints(group)
    lines = [f"## {summary}", "", "| flag | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(group):
        default = "" if field.default is None else f"`{field.default}`" if field.default != "" else ""
        meaning = str(field.metadata["help"]).replace("|", "\\|")
        lines.append(f"| `--{field.name}` | {default} | {meaning}{_choices(hints[field.name])} |")
    return "\n".join(lines) + "\n"


def _choices(hint: Any) -> str:
    if get_origin(hint) is not Literal:
        return ""
    return f" ({', '.join(f'`{choice}`' for choice in get_args(hint))})"


if __name__ == "__main__":
    print(flags_page(), end="")
