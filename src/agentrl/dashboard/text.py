"""Format values for pages: times, and untrusted text with its hidden characters visible."""

from __future__ import annotations

import re
import unicodedata
from datetime import datetime

from markupsafe import Markup, escape

from agentrl.documents.base import now
from agentrl.observe.terminal import MISSING, age, duration, number, percent, signed

_JOINERS = "\u200c\u200d"
"""Emoji and some scripts need them; they hide nothing."""
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")


def _hidden_characters() -> str:
    """Return the character class of what a browser does not show, or that reorders what it shows."""
    codes = [
        code
        for code in (*range(0x20000), *range(0xE0000, 0xE1000))  # all others are visible or unassigned
        if unicodedata.category(chr(code)) in _HIDDEN_CATEGORIES and chr(code) not in "\n\t" + _JOINERS
    ]
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


_HIDDEN = re.compile(f"[{_hidden_characters()}]")


def visible(value: object) -> Markup:
    """Return untrusted text as HTML: hidden characters become marked escapes such as ``\\x1b``, ``\\u202e``.

    Line feeds and tabs stay; show it in an element whose style keeps them (class ``text``).
    """
    text = "" if value is None else str(value).replace("\r\n", "\n")
    parts: list[Markup] = []
    end = 0
    for found in _HIDDEN.finditer(text):
        parts += [escape(text[end : found.start()]), _marked(found[0])]
        end = found.end()
    return Markup("").join([*parts, escape(text[end:])])


def _marked(character: str) -> Markup:
    code = ord(character)
    name = unicodedata.name(character, f"U+{code:04X}")
    shown = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return Markup('<span class="hidden-character" title="{}">{}</span>').format(name, shown)


def excerpt(value: object, limit: int = 120) -> Markup:
    """Return the first ``limit`` characters on one line, as ``visible`` shows them."""
    line = " ".join(str("" if value is None else value)[: 8 * limit].split())
    return visible(line if len(line) <= limit else line[: limit - 1] + "…")


def time(moment: datetime | None) -> Markup:
    """Return a moment in UTC as a ``<time>`` element."""
    if moment is None:
        return Markup(MISSING)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        moment.isoformat(timespec="seconds"), f"{moment:%Y-%m-%d %H:%M:%S}"
    )


def ago(moment: datetime | None, at: datetime | None = None) -> Markup:
    """Return how long before ``at`` (now) a moment was, as a ``<time>`` element titled with the time."""
    if moment is None:
        return Markup(MISSING)
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        moment.isoformat(timespec="seconds"), f"{moment:%Y-%m-%d %H:%M:%S}", age(moment, at or now())
    )


FILTERS = {
    "visible": visible,
    "excerpt": excerpt,
    "number": number,
    "percent": percent,
    "signed": signed,
    "duration": duration,
    "time": time,
    "ago": ago,
}
"""The Jinja filters of every template."""
