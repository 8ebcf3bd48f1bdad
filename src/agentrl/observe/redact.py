"""Remove secrets from text, in time that is linear in its length.

A rule finds a secret by its name (``password=…``), its place (``://user:password@host``) or its published
prefix (``AKIA…``, ``glpat-…``). To stay linear, a rule whose end may be missing limits every repetition
before it, or begins with a literal that the repetition cannot contain.
"""

from __future__ import annotations

import re
from collections.abc import Callable

HIDDEN = "***"

_ASSIGNED = r"""\\{0,4}["']?\]?\s{0,8}(?:=>|[:=]|%3D)\s{0,8}\\{0,4}["']?"""
"""What stands between a name and its value in shells, YAML, JSON (also inside a string), Python and URLs."""
_VALUE = r"""[^\s"',;&}]+"""
_QUOTED_OR_VALUE = r"""(?:(?<=")[^"\n]+|(?<=')[^'\n]+|[^\s"',;&}]+)"""
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
"""The start of a word, also after an escaped line break or a percent-encoded character."""

_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)"
    r".*?(?:(-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)|\Z)",
    re.DOTALL,
)
_USER_INFO = re.compile(r"""(?<=://)[^\s/'"<>]+@""")
_AUTHORIZATION = re.compile(
    rf"(authorization{_ASSIGNED})(?:(?:bearer|basic|digest|negotiate|token|apikey)\s{{1,8}})?{_VALUE}",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer\s{1,8})[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_NAMED = re.compile(
    r"((?:(?:api|access|account|auth|encryption|private|secret|signing|subscription)[_-]?key"
    r"|secret[_-]?access[_-]?key|secret|passw(?:or)?d|passphrase|credentials?"
    r"|(?:access|api|auth|bearer|id|personal|private|refresh|security|session)[_-]?token)"
    rf"{_ASSIGNED}){_QUOTED_OR_VALUE}",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"((?:(?<![A-Za-z])|(?<=%[0-9A-F]{2}))(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!per_)token\\{0,4}[\"']?\s{0,8}(?:=|%3D)\s{0,8}\\{0,4}[\"']?"
    r"|[\"']token\\{0,4}[\"']\s{0,8}:\s{0,8}\\{0,4}[\"'])"
    r"(?!\d{1,9}(?![A-Za-z0-9_-]))" + _QUOTED_OR_VALUE,
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"""((?<!-)--(?!-)[a-z0-9_-]{0,40}(?:key|token|secret|password|passphrase)["']?[\s,]{1,4}["']?)[^\s"',;-][^\s"',;]*""",
    re.IGNORECASE,
)
_QUERY = re.compile(
    r"([?&](?:key|sig|signature|code|auth|pat|x-amz-(?:signature|credential|security-token))=)[^\s\"'&#<>]+",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    rf"{_START}(?:"
    r"sk-[A-Za-z0-9_-]{16,}|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"  # OpenAI, Anthropic, Stripe
    r"|hf_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{40,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-[A-Za-z0-9_.-]{20,}|GR1348941[A-Za-z0-9_-]{20,}"
    r"|xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}"  # Slack
    r"|(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}"  # AWS: a key's id, and the secret beside it
    r"(?:[\s\"',:;/=|]{1,8}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+]))?"
    r"|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,})"  # Google
)
_SLACK_HOOK = re.compile(r"(?<=hooks\.slack\.com/services/)[A-Za-z0-9_/]+")
_JWT = re.compile(r"eyJ[A-Za-z0-9_.-]{16,}")
_JWT_PARTS = re.compile(r"[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}")

Rule = tuple[re.Pattern[str], "str | Callable[[re.Match[str]], str]"]


def _web_token(match: re.Match[str]) -> str:
    return HIDDEN if _JWT_PARTS.match(match.group()) else match.group()


def _private_key(match: re.Match[str]) -> str:
    return f"{match.group(1)}{HIDDEN}{match.group(2) or ''}"


_RULES: tuple[Rule, ...] = (
    (_PRIVATE_KEY, _private_key),
    (_USER_INFO, f"{HIDDEN}@"),
    (_AUTHORIZATION, rf"\1{HIDDEN}"),
    (_BEARER, rf"\1{HIDDEN}"),
    (_NAMED, rf"\1{HIDDEN}"),
    (_TOKEN, rf"\1{HIDDEN}"),
    (_OPTION, rf"\1{HIDDEN}"),
    (_QUERY, rf"\1{HIDDEN}"),
    (_SHAPES, HIDDEN),
    (_SLACK_HOOK, HIDDEN),
    (_JWT, _web_token),
)


def redact(text: str) -> str:
    """Return ``text`` with each secret that a rule finds replaced by ``***``."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact_and_cut(text: str, limit: int) -> str:
    """Return ``text`` redacted and cut to ``limit`` characters, with a notice of how many are missing.

    At most ``2 * limit`` characters are scanned, so the cost does not depend on the length of ``text``. If
    only a part is scanned, its end is not shown, because a secret may be cut there.
    """
    scanned = redact(text[: 2 * limit])
    complete = len(text) <= 2 * limit
    if complete and len(scanned) <= limit:
        return scanned
    shown = scanned[:limit] if complete else scanned[: min(limit, len(scanned) - limit // 16)]
    return f"{shown}\n[cut: {max(len(text), len(scanned)) - len(shown)} more characters]"
