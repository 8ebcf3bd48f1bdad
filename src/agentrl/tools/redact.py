"""Redact tool servers: their address without secrets, and other messages without those secrets.

A URL may hold a token as user info, as a query parameter or in its path; a stdio server receives tokens as
arguments and environment variables. Failure messages are stored and shown, so they must not contain tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from agentrl.tools.specs import HttpSpec, ManagerSpec, StdioSpec

HIDDEN = "***"
_SHORTEST = 8
"""Shorter values stay in messages: they are ports, names and flags."""
_TOKEN_PART = re.compile(r"(?=.*\d)[^/]{16,}|[^/]{32,}")


def redact_address(spec: StdioSpec | HttpSpec | ManagerSpec) -> str:
    """Return the command without arguments, or the URL without user info, query and token-like path parts."""
    if isinstance(spec, StdioSpec):
        return f"{spec.command}, {len(spec.args)} arguments" if spec.args else spec.command
    return redact_url(spec.url)


def redact_url(url: str) -> str:
    """Return ``url`` without user info, query, fragment and token-like path parts."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    user = f"{HIDDEN}@" if "@" in parts.netloc else ""
    path = "/".join(HIDDEN if _TOKEN_PART.fullmatch(part) else part for part in parts.path.split("/"))
    query = f"?{HIDDEN}" if parts.query else ""
    return f"{parts.scheme}://{user}{host}{path}{query}"


def redact_secrets(text: str, spec: StdioSpec | HttpSpec | ManagerSpec) -> str:
    """Return ``text`` without values that ``redact_address`` omits and without header and variable values."""
    if isinstance(spec, StdioSpec):
        secrets = [*spec.args, *(part for arg in spec.args for part in arg.split("=")), *spec.env.values()]
        return _hide(text, [value for value in secrets if not value.startswith("-")])
    shown = text.replace(spec.url, redact_url(spec.url))
    return _hide(shown, [*_url_secrets(spec.url), *_header_secrets(spec.headers)])


def _url_secrets(url: str) -> list[str]:
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    found = [*user.split(":"), *(value for _, value in parse_qsl(parts.query))]
    found += [part for part in parts.path.split("/") if _TOKEN_PART.fullmatch(part)]
    return [form for value in found for form in (value, unquote(value), quote(value, safe=""))]


def _header_secrets(headers: Mapping[str, str]) -> list[str]:
    return [part for value in headers.values() for part in (value, value.rpartition(" ")[2])]


def _hide(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    return text
