"""Format values for pages: numbers, times, and untrusted text with its hidden characters visible."""

from __future__ import annotations

import math
import re
import unicodedata
from datetime import datetime
from typing import Any

from markupsafe import Markup, escape

from agentrl.documents.base import now

MISSING = "–"
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


def number(value: Any, digits: int = 3) -> str:
    """Return a number with ``digits`` significant decimals; a dash for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return MISSING
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    if value and abs(value) < 10**-digits:
        return f"{value:.{max(0, digits - 2)}e}"
    if abs(value) >= 100:
        digits = max(0, digits - 2) if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}"


def signed(value: Any, digits: int = 2) -> str:
    """Return a number with its sign and ``digits`` decimals; a dash for anything but a finite number."""
    return MISSING if number(value) == MISSING else f"{value:+.{digits}f}"


def percent(value: Any, digits: int = 0) -> str:
    """Return a fraction as a percentage."""
    shown = number(value)
    return shown if shown == MISSING else f"{100 * value:.{digits}f} %"


def duration(seconds: Any) -> str:
    """Return seconds as text: ``350 ms``, ``12.5 s``, ``3 min 20 s``, ``5 h 02 min``, ``2 d 3 h``."""
    if number(seconds) == MISSING:
        return MISSING
    if abs(seconds) < 1:
        return f"{seconds * 1000:.0f} ms"
    if abs(seconds) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for name, size, smaller, unit in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // unit} {smaller}"
    return f"{whole} s"


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
    seconds = max(0.0, ((at or now()) - moment).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            text = f"{seconds / size:.0f} {unit} ago"
            break
    else:
        text = f"{seconds:.0f} s ago"
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        moment.isoformat(timespec="seconds"), f"{moment:%Y-%m-%d %H:%M:%S}", text
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
