"""Text that a model, a tool or a task file wrote, made safe to print on a terminal."""

from __future__ import annotations

import re

from rich.text import Text

_ESCAPE_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colors, cursor
    r"|(?:\x1b\]|\x9d).*?(?:\x07|\x1b\\|\x9c|\n|$)"  # OSC: titles, links
    r"|\x1b[PX^_].*?(?:\x1b\\|\x9c|\n|$)"  # DCS, SOS, PM, APC
    r"|\x1b."
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(value: object) -> str:
    """``value`` as text without escape sequences, control and bidirectional-override characters."""
    text = str(value).replace("\r\n", "\n")
    return _CONTROL.sub("", _ESCAPE_SEQUENCES.sub("", text))


def plain(value: object, style: str = "") -> Text:
    """``clean(value)`` for rich: its brackets are no markup."""
    return Text(clean(value), style=style)


def excerpt(value: object, limit: int) -> str:
    """The cleaned text on one line, cut to ``limit`` characters."""
    line = " ".join(clean(value).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
