"""Normal forms of answers, for comparison."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NOT_WORD = re.compile(r"[^\w\s]")
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")


def normalized(text: str) -> str:
    """Lower case, compatibility characters unified, no punctuation, no English articles, single spaces."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(_ARTICLES.sub(" ", _NOT_WORD.sub(" ", folded)).split())


def number(text: str) -> Decimal | None:
    """The decimal number that ``text`` is, thousands separators allowed; None for anything else."""
    plain = unicodedata.normalize("NFKC", text).strip().rstrip(".")
    if _GROUPED.fullmatch(plain):
        plain = plain.replace(",", "")
    try:
        value = Decimal(plain)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def same(left: str, right: str) -> bool:
    """Equal as numbers where both are numbers, else equal in normal form."""
    numbers = number(left), number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    forms = normalized(left), normalized(right)
    return forms[0] == forms[1] if any(forms) else left.strip() == right.strip()
