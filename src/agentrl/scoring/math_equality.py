"""Compare answers: as text in a normal form, and as mathematics by math-verify.

The scorers ``exact`` and ``f1`` and the judge's shortcut use the normal form, and ``math`` before it asks
math-verify.

math-verify alone drops units, bases, primes, dots and the case of letters, multiplies the letters of words
(*listen* = *silent*) and rounds to six decimals. Here each of them counts, but for a unit that only one of
the two answers has: questions often name the unit.
"""

from __future__ import annotations

import json
import logging
import math
import re
import unicodedata
from collections import Counter
from decimal import Decimal, InvalidOperation
from functools import cache, lru_cache
from string import ascii_lowercase
from typing import Any

from agentrl.base.concurrency import within_cpu

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
_CURRENCY_MARK = re.compile(r"(?<![\w$}\])])(?:US(?=\$))?\$\s*(?=[-+]?[\d.])")
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


# Cache it: a comparison asks for each of its forms, and the right answer comes again for each trajectory.
@lru_cache(maxsize=1024)
def plain(text: str) -> str:
    """Return ``text`` without what is only its looks: compatible characters, TeX for spaces and fonts, wraps.

    Superscripts become ``^{…}``, vulgar fractions ``\\frac``. Case, words and signs stay.
    """
    if text.isascii() and text.isalnum():
        return text
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
    form = _CURRENCY_MARK.sub("", plain(text))
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
    written = _CURRENCY_MARK.sub("", plain(text))
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


CPU_SECONDS = 5.0
"""Time of the processor that one comparison may take. A limit of the clock, as math-verify's own, would make
an equal answer unequal on a busy machine."""


def equal(golds: tuple[str, ...], answer: str) -> bool:
    """Return whether ``answer`` equals one of ``golds``, as text or as mathematics.

    A comparison beyond ``CPU_SECONDS`` counts as unequal. Call it in the main thread of a process, where
    signals arrive.
    """
    return any(same(gold, answer) or bool(within_cpu(CPU_SECONDS, _equal, gold, answer)) for gold in golds)


def unparsed(golds: tuple[str, ...]) -> list[bool]:
    """Return whether math-verify reads no value in each of ``golds``. Call it in a main thread."""
    return [
        number(gold) is None and not within_cpu(CPU_SECONDS, _parse, _quantity(gold)[0]) for gold in golds
    ]


def _equal(gold: str, answer: str) -> bool:
    if len(answer) > LONGEST or len(gold) > LONGEST:
        return False
    if number(gold) is not None and number(answer) is not None:
        return False
    (wanted, unit), (given, own_unit) = _quantity(gold), _quantity(answer)
    if unit and own_unit and unit != own_unit:
        return False
    if any(map(_RECORD.fullmatch, (wanted, given))) or _is_clock(wanted):
        return _fields(wanted) == _fields(given)
    if _joins(wanted) != _joins(given) and all(map(_joins, (wanted, given))):
        return False
    if any(kind(wanted) != kind(given) for kind in (_marks, _words)) or _are_words(wanted, given):
        return False
    brackets, own_brackets = _brackets(wanted), _brackets(given)
    if brackets and own_brackets and brackets != own_brackets:
        return False
    if brackets and "," in given and not re.search(r"[()\[\]{}]", given):
        given = given.join(brackets)  # an ordered pair without its brackets
    return _verify(*_with_cases(wanted, given))


_RECORD = re.compile(r"\d+([-/.])\d+(?:\1\d+)+|\d{3}-\d{4}|[12]\d{3}-(?:[12]\d)?\d\d")
"""A date, a span of years, a telephone number or a record of games: no difference and no quotient."""
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::[0-5]\d)?")


def _is_clock(gold: str) -> bool:
    """Return whether a reference is a time: as a ratio it would be reduced. 10:20 is not 1:2."""
    found = _CLOCK.fullmatch(gold)
    return found is not None and (found[2][0] == "0" or math.gcd(int(found[1]), int(found[2])) > 1)


def _fields(text: str) -> list[str]:
    """Return the numbers of a date or a time, and what separates them."""
    return [part.lstrip("0") or "0" if part.isdigit() else part for part in re.split(r"([-/.:])", text)]


def _joins(text: str) -> set[str]:
    """Return how the inequalities of an answer are joined, by *and* or by *or*: math-verify lists them."""
    if not re.search(r"[<>≤≥]|\\(?:[lg]eq?|lt|gt)(?![A-Za-z])", text):
        return set()
    return {"or" if word in ("or", "lor", "vee") else "and" for word in _JOIN.findall(text)}


_JOIN = re.compile(r"(?<![A-Za-z])(?:and|or|lor|land|vee|wedge)(?![A-Za-z])")
_GROUP = re.compile(r"(\(|\[|\\\{)(.*,.*)(\)|\]|\\\})")


def _brackets(text: str) -> tuple[str, str] | None:
    """Return the brackets around a whole tuple, interval or set; None for anything else.

    sympy drops them where an interval is empty: it has one value for [3, 1] and (3, 1).
    """
    found = _GROUP.fullmatch(text)
    depth, has_comma = 0, False
    for mark in re.findall(r"[()\[\]{},]", found[2] if found else ""):
        depth += (mark in "([{") - (mark in ")]}")
        has_comma |= mark == "," and depth == 0
        if depth < 0:
            return None
    return (found[1], found[3]) if found and has_comma and depth == 0 else None


_DROPPED = (
    re.compile(r"'|\\prime(?![A-Za-z])"),
    re.compile(r"\\[lcd]?dots[bc]?(?![A-Za-z])|\.\.\."),
    re.compile(r"\^ ?(?:T|\{ ?T ?\})(?![A-Za-z])"),
    re.compile(r"(?<![A-Za-z\\])[fghFGH] ?\^ ?\{? ?(?:-1|\(\w+\)) ?\}? ?(?=\(|\\left)"),
)


def _marks(text: str) -> list[int]:
    """Return how many primes, dots, transposes, inverse functions and derivatives a formula has.

    math-verify skips them, or takes them for powers.
    """
    return [len(pattern.findall(text)) for pattern in _DROPPED]


_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]+")
_ENVIRONMENT = re.compile(r"\\(?:begin|end) ?\{\w+\*?\}")
_FORMULA_WORDS = frozenset({
    "and", "or", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh",
    "tanh", "log", "ln", "exp", "sqrt", "pi", "inf", "infinity", "max", "min", "gcd", "lcm", "mod", "det",
    "percent", "percentage", "alpha", "beta", "gamma", "delta", "theta", "lambda", "sigma", "omega", "phi",
})  # fmt: skip
_SHORTEST_WORD = 4
"""Letters of a run that is a word inside a formula; a shorter one is a product of variables."""


def _words(text: str) -> list[str]:
    """Return the words in a formula, which math-verify multiplies letter by letter."""
    runs = (run.lower() for run in _LETTERS.findall(_ENVIRONMENT.sub("", text)))
    return [run for run in runs if len(run) >= _SHORTEST_WORD and run not in _FORMULA_WORDS]


def _are_words(*texts: str) -> bool:
    """Return whether both answers are nothing but words: they are compared as text alone."""
    runs = [run.lower() for text in texts for run in _LETTERS.findall(text)]
    letters_only = all(re.fullmatch(r"[A-Za-z ,.'-]+", text) for text in texts)
    return letters_only and any(
        len(run) > 1 and run not in _FORMULA_WORDS and set(run) & set("aeiou") for run in runs
    )


def _with_cases(*texts: str) -> list[str]:
    """Return the texts with new names for capitals that stand beside their small letters, N beside n.

    math-verify reads both as one variable.
    """
    tokens = {token for text in texts for token in _TOKEN.findall(text)}
    free = iter(letter for letter in ascii_lowercase[::-1] if letter not in tokens and letter not in "eid")
    capitals = sorted(token for token in tokens if token != token.lower() and token.lower() in tokens)
    names = {token: f" {name} " for token, name in zip(capitals, free, strict=False)}
    return [_TOKEN.sub(lambda found: names.get(found.group(), found.group()), text) for text in texts]


_UNITS = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
    "km": "km kilometer kilometre", "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard",
    "mi": "mi mile", "mg": "mg milligram", "g": "g gm gram", "kg": "kg kilogram", "lb": "lb lbs pound",
    "oz": "oz ounce", "ml": "ml mL milliliter millilitre", "l": "l L liter litre", "ms": "ms millisecond",
    "s": "s sec second", "min": "min minute", "h": "h hr hour", "d": "day", "mi/h": "mph", "km/h": "kmh kph",
    "$": "$ dollar usd USD US$", "¢": "¢ cent", "€": "€ euro eur EUR", "£": "£ gbp GBP",
    "¥": "¥ yen jpy JPY", "°": "° degree deg",
    "rad": "rad radian", "/": "/ per",
}  # fmt: skip
"""Units by their symbols, with their other names in the singular."""
_UNIT_NAMES = {name: symbol for symbol, names in _UNITS.items() for name in names.split()}
_NOT_UNITS = _FORMULA_WORDS | {
    "hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "halves", "third", "quarter",
    "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "hundredth", "thousandth", "lakh",
    "crore", "gross", "double", "twice", "thrice", "fold", "below", "above", "under", "negative",
    "squared", "cubed", "factorial", "over", "plus", "minus", "times", "divided", "modulo",
    "not", "than", "more", "less", "least", "most", "about",
}  # fmt: skip
"""Words behind a number that change it."""
_POWERS = {"square": "2", "sq": "2", "cubic": "3"}

_NAME = r"[A-Za-zµμΩ°¢€£¥]+(?:\^\{-?\d\})?"
_QUANTITY = re.compile(
    r"(?P<value>.*?(?:[\d)}\].]|\\pi))(?P<gap> ?)"
    rf"(?P<unit>(?:\^ ?\{{?\\circ ?\}}? ?|{_NAME})(?:[ /·*]*{_NAME}){{0,3}})"
)
_UNIT_PART = re.compile(r"([^\W\d_]+|[°¢€£¥/])(?:\^\{(-?\d)\})?")
_DEGREES = re.compile(r"\^ ?\{?\\circ ?\}?")
_CURRENCY = re.compile(r"(?P<sign>[-+]?) ?(?P<unit>(?:US)?[$€£¥]|USD|EUR|GBP|JPY) ?(?P<value>[-+]?[\d.].*)")
_BASE = re.compile(r"(?P<value>[\dA-Fa-f.]+)_\{?(?P<unit>\w+)\}?")


def _quantity(text: str) -> tuple[str, str | None]:
    """Return the value of an answer, and its unit, currency or base; None without one."""
    bare = plain(text)
    if (money := _CURRENCY.fullmatch(bare)) is not None:
        return money["sign"] + money["value"], _UNIT_NAMES[money["unit"]]
    if (base := _BASE.fullmatch(bare)) is not None:
        return base["value"], f"base {base['unit']}"
    found = _QUANTITY.fullmatch(bare)
    if found is None or _LETTERS.search(found["value"].rpartition("=")[2]):
        return bare, None
    unit = _unit(found["unit"], is_apart=bool(found["gap"]))
    return (bare, None) if unit is None else (found["value"], unit)


def _unit(text: str, *, is_apart: bool) -> str | None:
    """Return a unit in symbols, m2 for square meters; None if the words behind a number are not a unit.

    Any noun is a unit (18 eggs) if a space stands before it, and a single letter too: 5m is a product.
    """
    parts: list[str] = []
    power = ""
    for word, exponent in _UNIT_PART.findall(_DEGREES.sub("°", text)):
        name = word if len(word) < _SHORTEST_WORD else word.lower()
        symbol = _UNIT_NAMES.get(name) or _UNIT_NAMES.get(name.removesuffix("s"))
        if name in _POWERS:
            power = _POWERS[name]
            continue
        is_noun = (
            is_apart
            and len(name) > 2
            and _NOT_UNITS.isdisjoint({name.lower(), name.lower().removesuffix("s")})
        )
        is_variable = len(name) == 1 and name.isalpha() and not (is_apart or parts)
        if is_variable or not (symbol or is_noun or parts == ["°"]):
            return None
        parts.append((symbol or name.lower()) + (exponent or power))
        power = ""
    return "".join(parts) or None


_REWRITES = (
    (re.compile(r"(?<![\w.])(\d+) (\d+)/(\d+)(?!\d)"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)"), r"\1\\times 10^{\2}"),
    (re.compile(r"(?<=\d) ?x ?(?=10\^)"), r"\\times "),
    (
        re.compile(r"(?<!\w)0(?:x[\da-f]+|b[01]+|o[0-7]+)(?!\w)", re.I),
        lambda found: str(int(found.group(), 0)),
    ),
    (re.compile(r"\*\* ?([+-]?\w+)"), r"^{\1}"),
    (re.compile(r"\\(?:[cd]dots|dots[bc]?)(?![A-Za-z])|\.\.\."), r"\\ldots "),
    (re.compile(r"√ ?(\d+(?:\.\d+)?|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile("√"), r"\\sqrt "),
    (re.compile(r"\\sqrt ?\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile("∞"), r"\\infty "),
    (re.compile("·"), r"\\cdot "),
    (re.compile(r"∅|\\varnothing(?![A-Za-z])"), r"\\emptyset "),
)
"""What people write and math-verify does not read, or reads as something else (2 1/2 as 3/2)."""


_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\overline ?\{(\d+)\}")


def _fraction(found: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction: 0.1\\overline{6} is 15/90."""
    whole, fixed, repeated = found.groups()
    above = int(whole + fixed + repeated) - int(whole + fixed or "0")
    return f"\\frac{{{above}}}{{{'9' * len(repeated) + '0' * len(fixed)}}}"


def _parse(text: str) -> list[Any]:
    """Return what math-verify reads in a formula: at most one expression of sympy.

    Units are not dropped: it would take the t of 16t for one. Numbers in a text that it cannot read are not
    picked out.
    """
    from math_verify import parse

    if not _is_balanced(text):
        return []
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_fraction, text)
    written = text.replace("$", "")
    read = parse(f"\\boxed{{{written}}}", [_extraction()], parsing_timeout=None)
    values = [value for value in read if not isinstance(value, str)]
    return values if _INDEX.search(text) else [_with_imaginary(value) for value in values]


_INDEX = re.compile(r"_ ?\{? ?i|\bi ?=|\\hat|\\vec|(?<![A-Za-z\\])j(?![A-Za-z])")
"""A formula in which i is an index or a vector."""


def _with_imaginary(value: Any) -> Any:
    """Return an expression with sympy's imaginary unit for i, which math-verify takes for a variable."""
    names = [symbol for symbol in getattr(value, "free_symbols", ()) if str(symbol) == "i"]
    return value.subs(names[0], "I") if names else value


@cache
def _extraction() -> Any:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    return LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
        )
    )


def _is_balanced(text: str) -> bool:
    """Return whether braces close: otherwise the text would end the box that it is put into."""
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


_DECIMALS, _DIGITS = 1e-6, 1e-3
"""Differences up to which two numbers may be equal, of their values and relative to them: math-verify takes
every number below 1e-6 for every other."""


def _verify(gold: str, answer: str) -> bool:
    from math_verify import verify

    wanted, given = _parse(gold), _parse(answer)
    if not verify(wanted, given, timeout_seconds=None):
        return False
    one, other = (next(map(_value, read), None) for read in (wanted, given))
    scales = (0.01, 1, 100) if ("%" in gold) != ("%" in answer) else (1,)  # 5 for 5% is accepted
    return one is None or other is None or any(_is_near(one * scale, other) for scale in scales)


def _value(read: Any) -> Any:
    """Return the value of a sympy expression; None if it is not a finite number."""
    try:
        value = read.doit().evalf() if getattr(read, "is_number", False) else None
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return None
    return value if value is not None and value.is_finite else None


def _is_near(one: Any, other: Any) -> bool:
    apart, size = abs(one - other).evalf(), max(abs(one).evalf(), abs(other).evalf())
    return bool(apart <= max(_DECIMALS, size * 1e-12) and apart <= size * _DIGITS)
