"""Answer errors with a page that says what is wrong and how to fix it."""

from __future__ import annotations

import logging
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from agentrl.dashboard.render import render
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    RunMissingError,
    SchemaVersionError,
    StoreDeniedError,
    StoreUnavailableError,
)

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
    answer = render(
        request, "error.html", title=title, message=error.detail, hint=None, status=error.status_code
    )
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
