"""Compare answers as text: by a normal form that drops only what cannot change their meaning.

The scorers ``exact`` and ``f1`` and the judge's shortcut use it, and ``math`` before it asks math-verify.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from decimal import Decimal, InvalidOperation

_WORD = r"[^\W\d_]"
"""A letter of any script."""

_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_GROUPED_INSIDE = re.compile(r"(?<![\w.,(\[{])\d{1,3}(?:,\d{3})+(?![\w,)\]}]|\.\d{3},)")

_COMPATIBLE = frozenset({"<wide>", "<narrow>", "<noBreak>", "<compat>"})
"""Kinds of Unicode characters that NFKC replaces by the same text. It also replaces ``<super>`` (3² by 32),
``<fraction>`` (2½ by 21/2) and ``<font>`` (ℝ by R), which changes the meaning."""

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+"), re.compile("[₀-₉]+")
_SIGNS = str.maketrans({
    **dict.fromkeys("−‐‑–", "-"), **dict.fromkeys("’‘", "'"), **dict.fromkeys("“”", '"'),
    **dict.fromkeys("\u00ad\u200b\u200e\u200f\u2060\ufeff", ""), "⁄": "/", "。": ".",
    **dict.fromkeys("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069", ""),
})  # fmt: skip
"""Characters that look alike; invisible ones, such as those of the writing direction, are dropped."""
_HARD_SPACE = re.compile(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))")
"""A space that separates thousands: nobody writes a list of numbers with one."""

_TEX = (
    (re.compile(r"\\(?:left|right)(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\[dt]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"(?<=\d)(?:,?\\[,!]|\{,\})\s*(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])"), " "),
    (re.compile(r"(?<!\\)\\([%$#&])"), r"\1"),
    (re.compile(r"\^\s*([+-]?\d+)(?![\w.])"), r"^{\1}"),
    (re.compile(r"_(\d+)(?![\w.])"), r"_{\1}"),
    (re.compile(r"\\degree(?![A-Za-z])\s*"), "°"),
)
"""TeX that changes only the layout: (pattern, replacement)."""
_TEX_TEXT = re.compile(r"\\(?:text(?:normal|rm|bf|it|sf|tt)?|mathrm|mbox)\s*\{([^{}]*)\}")
_DEEPEST = 4
"""Levels of ``\\text{…}`` inside each other that are opened."""

_WRAPS = (
    (re.compile(r"\$\$?([^$]*[^$\s][^$]*)\$\$?"), r"\1"),
    (re.compile(r"\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL), r"\1\2"),
    (re.compile(r"\\(?:boxed|fbox) ?\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"), r"\1"),
    (re.compile(r"\*\*([^*]+)\*\*|\*([^*]+)\*|`([^`]+)`"), r"\1\2\3"),
    (re.compile(r"\"([^\"]+)\"|'([^']+)'"), r"\1\2"),
    (re.compile(r"\(([^()\[\]{},;]+)\)"), r"\1"),
    (re.compile(r"= *([^=<>≤≥]+)"), r"\1"),
)
"""What may stand around a whole answer: math mode, a box, emphasis, quotes, parentheses around one value,
``=``."""
_TAIL = re.compile(r"[\s,;:]+$|(?<!\.)\.$")
"""Punctuation behind an answer. Several dots mean that it goes on, and ``!`` is a factorial."""
_CURRENCY = re.compile(r"(?<![\w$}\])])(?:US(?=\$))?\$\s*(?=[-+]?[\d.])")
_LETTER = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice) )?[(\[]?([A-Za-z])[)\]]?[.:)]?")
_LABEL = re.compile(r"[(\[]?([A-Z])[)\].:]+ +(?=\S)")
"""The letter of an option before its text."""

_SHORT_FORMS = (
    (re.compile(r"(?<=\d) ?([AaPp])\.? ?[Mm]\b\.?"), r" \1m"),
    (re.compile(r"(?<![\w.])(?:[A-Z]\.)+[A-Z]\b\.?"), lambda found: found.group().replace(".", "")),
)
"""How clock times and acronyms are written."""
_PROSE = re.compile(rf"(?=.*?{_WORD}{{2}})(?:{_WORD}|[\d\s.,;:!?'\"()&-])*+")
_ARTICLE = re.compile(rf"\b(?:[Tt]he|THE|[Aa]n|AN|a)\s+(?={_WORD}{{2}})")
_PROSE_STEPS = (
    (re.compile(rf"(?<={_WORD} )([A-Z])\.(?= {_WORD}{{2}})"), r"\1"),
    (re.compile(rf"(?<={_WORD}{{3}})( \d{{1,2}}),(?= \d{{4}}\b)"), r"\1"),
    (re.compile(r"\""), ""),
    (re.compile(rf"(?<={_WORD}{{3}})-(?={_WORD}{{3}})"), " "),
    (re.compile(rf"(?<={_WORD}{{2}})[,;:.?!]+(?=\s|$)"), ""),
    (re.compile(rf"(?<!\S)\(({_WORD}{{2,}}(?: {_WORD}{{2,}})*)\)(?!\S)"), r"\1"),
)
"""What is dropped between the words of a text."""
_LOOSE = re.compile(r" ?([-+*/=<>(){}\[\],;^|%]) ?| (?=\\[A-Za-z])|(?<=\\)([A-Za-z]+) (?![A-Za-z])")
"""Spaces that mean nothing in a formula. Those between letters and between digits stay."""
_CASED = re.compile(rf"(\d\s*)?({_WORD}+)")
_ANY_CASE = frozenset({"am", "pm", "bc", "ad"})
_APART = re.compile(r"(?<=\d) (?=[^\W\d_])")
"""The space between a number and its unit: 5 km is 5km."""

LONGEST = 2000
"""Characters from which on an answer is compared as it stands, but for white space: no answer of a person is
longer, and the cost of a comparison stays bounded."""


def plain(text: str) -> str:
    """Return ``text`` without what is only its looks: compatible characters, TeX for spaces and fonts, wraps.

    Superscripts become ``^{…}``, vulgar fractions ``\\frac``. Case, words and signs stay.
    """
    folded = " ".join(_HARD_SPACE.sub(",", text).split())
    folded = _RAISED.sub(lambda found: f"^{{{found.group().translate(_SUPERSCRIPTS)}}}", folded)
    folded = _LOWERED.sub(lambda found: f"_{{{found.group().translate(_SUBSCRIPTS)}}}", folded)
    folded = unicodedata.normalize("NFC", "".join(map(_compatible, folded))).translate(_SIGNS)
    for _ in range(_DEEPEST):
        folded = _TEX_TEXT.sub(r"\1", folded)
    for pattern, replacement in _TEX:
        folded = pattern.sub(replacement, folded)
    before = ""
    while folded != before:
        before, folded = folded, _TAIL.sub("", folded.strip()) or folded
        for pattern, replacement in _WRAPS:
            if (wrap := pattern.fullmatch(folded)) is not None:
                folded = wrap.expand(replacement)
    return " ".join(folded.split())


def _compatible(character: str) -> str:
    if character.isascii():
        return character
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    kind = unicodedata.decomposition(character).partition(" ")[0]
    if kind == "<fraction>":
        above, _, below = unicodedata.normalize("NFKC", character).partition("⁄")
        return f"\\frac{{{above}}}{{{below}}}" if below else character
    return unicodedata.normalize("NFKC", character) if kind in _COMPATIBLE else character


def normal_form(text: str) -> str:
    """Return the normal form of an answer: two answers with the same form mean the same.

    Beside ``plain``: a single letter, as of an option, has no case and no bracket. In words, case and the
    punctuation between them do not count, nor thousands separators outside of brackets.
    """
    if len(text) > LONGEST:
        return " ".join(text.split())
    form = _CURRENCY.sub("", plain(text))
    if (letter := _LETTER.fullmatch(form)) is not None:
        return letter.group(1).lower()
    form = _LABEL.sub(r"\1: ", form, count=1) if _LABEL.match(form) else form
    form = _GROUPED_INSIDE.sub(lambda found: found.group().replace(",", ""), form)
    for pattern, replacement in _SHORT_FORMS:
        form = pattern.sub(replacement, form)
    if _PROSE.fullmatch(form) is None:
        return _LOOSE.sub(r"\1\2", form)
    for pattern, replacement in _PROSE_STEPS:
        form = pattern.sub(replacement, form)
    return " ".join(_CASED.sub(_fold, form).split())


def _fold(found: re.Match[str]) -> str:
    """Return a word in lower case; a unit behind a number keeps its own, as mW is not MW."""
    number_before, word = found.groups()
    is_unit = number_before is not None and word.casefold() not in _ANY_CASE
    if is_unit and (len(word) <= 2 or (len(word) == 3 and word[1:] != word[1:].lower())):
        return found.group()
    return (number_before or "") + word.casefold()


def without_articles(text: str) -> str:
    """Return the normal form without English articles in front of words.

    A capital A stays: it names options, vitamins and keys. So does an article that is the whole answer.
    """
    if len(text) > LONGEST:
        return normal_form(text)
    bare = plain(text)
    return normal_form(_ARTICLE.sub("", bare) if _PROSE.fullmatch(bare) else bare)


def number(text: str) -> Decimal | None:
    """Return ``text`` as a decimal number; None if it is not one. Thousands separators are allowed."""
    if len(text) > LONGEST:
        return None
    written = _CURRENCY.sub("", plain(text))
    if _GROUPED.fullmatch(written):
        written = written.replace(",", "")
    try:
        value = Decimal(written) if "_" not in written else None
    except InvalidOperation:
        return None
    return value if value is not None and value.is_finite() else None


def same(left: str, right: str) -> bool:
    """Return whether two answers mean the same: equal numbers, JSON values or normal forms, none empty."""
    numbers = number(left), number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    return any(
        (form := _APART.sub("", form_of(left))) and form == _APART.sub("", form_of(right))
        for form_of in (_json_form, normal_form, without_articles)
    )


def _json_form(text: str) -> str:
    """Return a JSON list or object without its spaces and its order of keys; nothing for another text."""
    try:
        return json.dumps(json.loads(text), sort_keys=True) if text.strip()[:1] in ("{", "[") else ""
    except (ValueError, RecursionError):
        return ""


def word_f1(predicted: str, gold: str) -> float:
    """Return 1 for the ``same`` answer, else the harmonic mean of precision and recall over words."""
    if same(predicted, gold):
        return 1.0
    words, wanted = without_articles(predicted).split(), without_articles(gold).split()
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / max(1, len(words) + len(wanted))
