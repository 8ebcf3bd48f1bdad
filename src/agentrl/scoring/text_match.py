"""Scorers ``exact`` and ``f1``: compare answers as text, in normal form."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from decimal import Decimal, InvalidOperation

from agentrl.errors import ScorerError
from agentrl.scoring.scorers import ScorerContext, scorer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NOT_WORD = re.compile(r"[^\w\s]")
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")


@scorer("exact")
async def exact(context: ScorerContext) -> float:
    """Return 1 if the answer equals an accepted one, else 0.

    Case, punctuation, English articles and thousands separators are ignored.
    """
    if not context.accepted:
        raise ScorerError("the task has no answer to compare with")
    if context.final_answer is None:
        return 0.0
    return float(any(same(context.final_answer, answer) for answer in context.accepted))


@scorer("f1")
async def f1(context: ScorerContext) -> float:
    """Return the best word F1 over all accepted answers, in [0, 1] (SQuAD, arXiv 1606.05250)."""
    if not context.accepted:
        raise ScorerError("the task has no answer to compare with")
    if context.final_answer is None:
        return 0.0
    return max(word_f1(context.final_answer, answer) for answer in context.accepted)


def word_f1(predicted: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over the words of the normal forms."""
    words, wanted = normalized(predicted).split(), normalized(gold).split()
    if not words or not wanted:
        return float(words == wanted)
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / (len(words) + len(wanted))


def normalized(text: str) -> str:
    """Return ``text`` in lower case and NFKC, with single spaces and without punctuation and articles."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(_ARTICLES.sub(" ", _NOT_WORD.sub(" ", folded)).split())


def number(text: str) -> Decimal | None:
    """Return ``text`` as a decimal number; None if it is not one. Thousands separators are allowed."""
    plain = unicodedata.normalize("NFKC", text).strip().rstrip(".")
    if _GROUPED.fullmatch(plain):
        plain = plain.replace(",", "")
    try:
        value = Decimal(plain)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def same(left: str, right: str) -> bool:
    """Return whether two answers are equal: as numbers if both are numbers, else in normal form."""
    numbers = number(left), number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    forms = normalized(left), normalized(right)
    return forms[0] == forms[1] if any(forms) else left.strip() == right.strip()
