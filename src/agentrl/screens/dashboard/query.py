"""Read what a request asks: its query, a filter of trajectories, a posted form; an error becomes a page."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from agentrl.errors import (
    AgentRLError,
    ConfigError,
    RunMissingError,
    SchemaVersionError,
    StoreDeniedError,
    StoreUnavailableError,
)
from agentrl.screens.dashboard.render import render, same_page
from agentrl.screens.views.read import Bounds, TrajectoryFilter, TrajectoryOrder

logger = logging.getLogger(__name__)

_STATUSES: tuple[tuple[type[AgentRLError], HTTPStatus, str], ...] = (
    (RunMissingError, HTTPStatus.NOT_FOUND, "The run does not exist"),
    (ConfigError, HTTPStatus.NOT_FOUND, "The run does not exist"),
    (SchemaVersionError, HTTPStatus.CONFLICT, "Another version of AgentRL wrote this run"),
    (StoreDeniedError, HTTPStatus.FORBIDDEN, "The database refuses this user"),
    (StoreUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE, "The database does not answer"),
    (AgentRLError, HTTPStatus.INTERNAL_SERVER_ERROR, "The database refuses this"),
)
_RETRY_SECONDS = "5"


class NotFoundError(HTTPException):
    """Raise it in a page for something that a run does not have; it becomes a page with status 404."""

    def __init__(self, message: str) -> None:
        super().__init__(HTTPStatus.NOT_FOUND, message)


class BadQueryError(HTTPException):
    """Raise it in a page for a query parameter that is wrong; it becomes a page with status 400."""

    def __init__(self, message: str) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, message)


async def _known(request: Request, error: Exception) -> Response:
    if not isinstance(error, AgentRLError):
        raise error
    status, title = next((status, title) for kind, status, title in _STATUSES if isinstance(error, kind))
    answer = render(request, "error.html", title=title, message=error.message, hint=error.hint, status=status)
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        answer.headers["Retry-After"] = _RETRY_SECONDS
    return answer


async def _http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    title = HTTPStatus(error.status_code).phrase
    message = error.detail
    if message == HTTPStatus.NOT_FOUND.phrase:  # no route, so no page has said what is missing
        message = f"the dashboard has no page {request.url.path[:200]}"
    answer = render(request, "error.html", title=title, message=message, hint=None, status=error.status_code)
    answer.headers.update(error.headers or {})
    return answer


async def _bug(request: Request, error: Exception) -> Response:
    logger.error("a page failed", extra={"page": request.url.path}, exc_info=error)
    return render(
        request,
        "error.html",
        title="This page has a bug",
        message=f"{type(error).__name__}: {error}",
        hint="the log of the dashboard has the traceback",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
    )


HANDLERS: dict[type[Exception] | int, ExceptionHandler] = {
    AgentRLError: _known,
    HTTPException: _http,
    Exception: _bug,
}


_TEXTS: Final = ("status", "split", "task", "tool", "failure", "label", "text", "answer_seen_in")
_RANGES: Final = ("score", "tokens", "turns")
FIELDS: Final = (
    *_TEXTS, "step", "version", *(f"{end}_{name}" for name in _RANGES for end in ("min", "max")), "order",
)  # fmt: skip
_MAX_CHARS = 500
PAGE_ROWS = 50
_MAX_PAGE = 1_000_000


@contextmanager
def checked_query() -> Iterator[None]:
    """Turn a ConfigError of the block, which names a bad field of the query, into a BadQueryError."""
    try:
        yield
    except ConfigError as error:
        raise BadQueryError(f"{error.message}: {error.hint}" if error.hint else error.message) from error


def whole(
    query: Mapping[str, str], name: str, default: int | None = None, *, low: int = 0, high: int = 2**31
) -> int | None:
    """Return a query parameter as a whole number; ``default`` without one. Raises BadQueryError."""
    text = query.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and low <= int(text) <= high):
        raise BadQueryError(f"{name} is {text[:80]!r}; give a whole number from {low} to {high}")
    return int(text)


def choice(query: Mapping[str, str], name: str, choices: Collection[str], default: str) -> str:
    """Return a query parameter that has one of ``choices``; ``default`` without one. Raises BadQueryError."""
    text = query.get(name, "").strip()
    if not text:
        return default
    if text not in choices:
        raise BadQueryError(f"{name} is {text[:80]!r}; give one of {', '.join(choices)}")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOfList:
    """One page of a list of ``total`` rows, with the addresses of its neighbors."""

    skip: int
    limit: int
    total: int
    previous: str | None
    next: str | None

    @property
    def first(self) -> int:
        """The number of the first row, from 1; 0 without a row."""
        return min(self.skip + 1, self.total)

    @property
    def last(self) -> int:
        """The number of the last row."""
        return min(self.skip + self.limit, self.total)


def skipped(request: Request) -> int:
    """Return how many rows come before the page that the parameter ``page`` (from 1) names."""
    page = whole(request.query_params, "page", 1, low=1, high=_MAX_PAGE) or 1
    return (page - 1) * PAGE_ROWS


def page_of(request: Request, total: int) -> PageOfList:
    """Return the page of a list of ``total`` rows that the parameter ``page`` names."""
    skip = skipped(request)
    number = skip // PAGE_ROWS + 1
    return PageOfList(
        skip=skip,
        limit=PAGE_ROWS,
        total=total,
        previous=same_page(request, page=number - 1 if number > 2 else None) if number > 1 else None,
        next=same_page(request, page=number + 1) if skip + PAGE_ROWS < total else None,
    )


def no_trajectory(run: str, record_id: str) -> NotFoundError:
    """Return the error for an id that no trajectory of the run has."""
    return NotFoundError(f"run {run!r} has no trajectory {record_id[:200]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterForm:
    """The fields of the form as they were given, without empty ones, and what they mean."""

    given: Mapping[str, str]
    wanted: TrajectoryFilter
    order: TrajectoryOrder

    def value(self, name: str) -> str:
        """Return a field as it was given; empty if it was not."""
        return self.given.get(name, "")

    def query(self, **changes: str | None) -> str:
        """Return the query of a URL with this filter and ``changes``; None leaves a field out."""
        fields = {**self.given, **changes}
        return urlencode({name: value for name, value in fields.items() if value})


def read_form(query: Mapping[str, str]) -> FilterForm:
    """Return the filter that a query asks for. Raises BadQueryError that names a bad field."""
    given = {name: query[name].strip() for name in FIELDS if query.get(name, "").strip()}
    for name, value in given.items():
        if len(value) > _MAX_CHARS:
            raise BadQueryError(f"{name} has {len(value)} characters: give at most {_MAX_CHARS}")
    with checked_query():
        fields: dict[str, Any] = {name: given.get(name) for name in _TEXTS}
        for name in _RANGES:
            fields[name] = Bounds(*(_number(f"{end}_{name}", given) for end in ("min", "max")))
        wanted = TrajectoryFilter(step=whole(given, "step"), version=whole(given, "version"), **fields)
    order = choice(given, "order", list(TrajectoryOrder), TrajectoryOrder.NEWEST)
    return FilterForm(given=given, wanted=wanted, order=TrajectoryOrder(order))


def _number(name: str, given: Mapping[str, str]) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        return float(value)
    except ValueError:
        raise BadQueryError(f"{name} is {value[:80]!r}: give a number") from None


FORM_FIELD: Final = "csrf"
_FORM_COOKIE: Final = "agentrl_csrf"
_SECRET = secrets.token_bytes(32)
"""A form that was loaded before the dashboard started is refused: load the page again."""
_MAX_FORM_COOKIE = 100
_FORM_BYTES = 64 * 1024
_FORM_SECONDS = 30.0


def give_token(request: Request) -> tuple[str, str]:
    """Return the token for a form, and the cookie that it belongs to (``set_cookie`` sends it)."""
    cookie = request.cookies.get(_FORM_COOKIE, "")
    if not 0 < len(cookie) <= _MAX_FORM_COOKIE:
        cookie = secrets.token_urlsafe(32)
    return _form_token(cookie), cookie


def set_cookie(request: Request, response: Response, cookie: str) -> None:
    """Send the cookie with a page that has a form, and let the browser name the page's origin."""
    response.set_cookie(
        _FORM_COOKIE, cookie, httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )
    response.headers["Referrer-Policy"] = "same-origin"


async def posted_form(request: Request) -> dict[str, str]:
    """Return the fields of a posted form of this dashboard.

    Raises HTTPException 413 for a body above 64 KiB, 408 for one that takes longer than 30 seconds, 403 for a
    form of another site.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_FORM_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _FORM_BYTES:
                    raise HTTPException(
                        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The form has more than {_FORM_BYTES:,} bytes."
                    )
    except TimeoutError:
        raise HTTPException(
            HTTPStatus.REQUEST_TIMEOUT, f"The form did not arrive within {_FORM_SECONDS:.0f} s."
        ) from None
    try:
        fields = parse_qs(body.decode("utf-8"), keep_blank_values=True, max_num_fields=20)
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "The form cannot be read.") from error
    form = {name: given[-1] for name, given in fields.items()}
    _check_form(request, form.get(FORM_FIELD, ""))
    return form


def _check_form(request: Request, given: str) -> None:
    """Raise HTTPException 403 unless the request comes from a form of this dashboard."""
    host = request.headers.get("host", "")
    same_host = bool(host) and urlsplit(request.headers.get("origin", "")).netloc == host
    same_site = request.headers.get("sec-fetch-site", "same-origin") == "same-origin"
    cookie = request.cookies.get(_FORM_COOKIE, "")
    same_token = bool(cookie) and hmac.compare_digest(given.encode(), _form_token(cookie).encode())
    if not (same_host and same_site and same_token):
        raise HTTPException(
            HTTPStatus.FORBIDDEN,
            "This does not come from a form of this dashboard, or the form is older than the dashboard: load"
            " its page again.",
        )


def _form_token(cookie: str) -> str:
    return hmac.new(_SECRET, cookie.encode(), hashlib.sha256).hexdigest()
