"""Protect what a page writes from requests that other sites make: a token, and the Origin header."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FIELD: Final = "csrf"
_COOKIE: Final = "agentrl_csrf"
_SECRET = secrets.token_bytes(32)
"""A form that was loaded before the dashboard started is refused: load the page again."""
_MAX_COOKIE = 100


def give_token(request: Request) -> tuple[str, str]:
    """Return the token for a form, and the cookie that it belongs to (``set_cookie`` sends it)."""
    cookie = request.cookies.get(_COOKIE, "")
    if not 0 < len(cookie) <= _MAX_COOKIE:
        cookie = secrets.token_urlsafe(32)
    return _token(cookie), cookie


def set_cookie(request: Request, response: Response, cookie: str) -> None:
    """Send the cookie with a page that has a form, and let the browser name the page's origin."""
    response.set_cookie(
        _COOKIE, cookie, httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )
    response.headers["Referrer-Policy"] = "same-origin"


def check(request: Request, given: str) -> None:
    """Raise HTTPException 403 unless the request comes from a form of this dashboard."""
    host = request.headers.get("host", "")
    same_host = bool(host) and urlsplit(request.headers.get("origin", "")).netloc == host
    same_site = request.headers.get("sec-fetch-site", "same-origin") == "same-origin"
    cookie = request.cookies.get(_COOKIE, "")
    same_token = bool(cookie) and hmac.compare_digest(given.encode(), _token(cookie).encode())
    if not (same_host and same_site and same_token):
        raise HTTPException(
            HTTPStatus.FORBIDDEN,
            "This does not come from a form of this dashboard, or the form is older than the dashboard: load"
            " the page of the trajectory again.",
        )


def _token(cookie: str) -> str:
    return hmac.new(_SECRET, cookie.encode(), hashlib.sha256).hexdigest()
