"""Extract the final answer from an assistant's text, as ``answer_schema`` marks it; compare two answers."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from decimal import Decimal, InvalidOperation

from agentrl.chat.parsers.reasoning import split_reasoning
from agentrl.errors import ConfigError

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*|####")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NOT_WORD = re.compile(r"[^\w\s]")
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_HASHES = re.compile(r"####\s*\$?(-?[0-9][0-9.,]*)")


def check_schema(schema: str) -> None:
    """Raise ConfigError unless ``schema`` is ``boxed``, ``####`` or a word that can name a tag."""
    if not _WORD.fullmatch(schema):
        raise ConfigError(
            f"answer_schema is {schema!r}; it must be one word",
            hint="use 'answer' for <answer>…</answer>, 'boxed' for \\boxed{…}, '####' for #### 72, or a tag",
        )


def extract_answer(text: str, schema: str) -> str | None:
    """Return the last marked answer outside of ``<think>…</think>``, stripped; None without one.

    ``boxed`` is the last ``\\boxed{…}``, else the last ``\\fbox{…}``, with nested braces. ``####`` is the
    number behind the last ``####``, as in GSM8K. Any other word X is the last ``<X>…</X>``.
    """
    check_schema(schema)
    spoken = split_reasoning(text).rest
    if schema == "boxed":
        found = _last_braced(spoken, "\\boxed")
        return found if found is not None else _last_braced(spoken, "\\fbox")
    if schema == "####":
        hashes = _HASHES.findall(spoken)
        return hashes[-1].rstrip(".,") if hashes else None
    tag = re.escape(schema)
    matches = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", spoken, re.DOTALL)
    return matches[-1].strip() if matches else None


def _last_braced(text: str, command: str) -> str | None:
    """Return the content of the last complete ``command{…}``."""
    for match in reversed(list(re.finditer(re.escape(command) + r"\s*\{", text))):
        depth, start = 1, match.end()
        for at in range(start, len(text)):
            escaped = text[at - 1] == "\\" and text[at - 2] != "\\"
            if not escaped and text[at] in "{}":
                depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[start:at].strip()
    return None


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
