"""Takes secrets out of text: credentials in URIs, Authorization headers, API keys and tokens."""

from __future__ import annotations

import re

HIDDEN = "***"

_URI_CREDENTIALS = re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/'\"<>]+@", re.IGNORECASE)
_AUTHORIZATION = re.compile(
    r"""((?:proxy-)?authorization["']?\s*[:=]\s*["']?)(?:(bearer|basic|token)\s+)?[^\s"',}]+""", re.IGNORECASE
)
_BEARER = re.compile(r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_NAMED_SECRET = re.compile(
    r"""((?:api[_-]?key|secret|password|passwd|(?:access|auth|bearer|refresh)[_-]?token|[?&]token)"""
    r"""["']?\s*[:=]\s*["']?)[^\s"',;&}]+""",
    re.IGNORECASE,
)
_KEY_SHAPES = re.compile(r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,})")


def redact(text: str) -> str:
    """``text`` with every secret that can be told by its shape or its name replaced by ``***``."""
    text = _URI_CREDENTIALS.sub(rf"\1{HIDDEN}@", text)
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    text = _NAMED_SECRET.sub(rf"\1{HIDDEN}", text)
    return _KEY_SHAPES.sub(HIDDEN, text)
