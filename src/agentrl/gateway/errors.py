"""The errors that a gateway answers; each dialect writes them in its own shape."""

from __future__ import annotations

import logging
from typing import Literal

from agentrl.errors import (
    AgentRLError,
    ContextFullError,
    FailureError,
    StoreUnavailableError,
    TrajectoryError,
)
from agentrl.inference.engine import EngineRefusedError

logger = logging.getLogger(__name__)

Kind = Literal[
    "invalid", "too_large", "authentication", "not_found", "limit", "timeout", "unavailable", "internal"
]

STATUS: dict[Kind, int] = {
    "invalid": 400, "authentication": 401, "limit": 403, "not_found": 404, "timeout": 408, "too_large": 413,
    "internal": 500, "unavailable": 503,
}  # fmt: skip


class GatewayError(AgentRLError):
    """A request that gets no answer. ``code`` names the reason for programs, ``param`` the field."""

    def __init__(
        self, kind: Kind, message: str, *, code: str, param: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind: Kind = kind
        self.code = code
        self.param = param

    @property
    def status(self) -> int:
        """Return the HTTP status."""
        return STATUS[self.kind]

    @property
    def text(self) -> str:
        """Return message and hint on one line."""
        return f"{self.message} ({self.hint})" if self.hint else self.message


def invalid(message: str, param: str | None = None, *, code: str = "invalid_value") -> GatewayError:
    """Return the error for a request that no retry makes valid."""
    return GatewayError("invalid", message, code=code, param=param)


def dead_url() -> GatewayError:
    """Return the error for a URL whose trajectory has ended, and for one that never was."""
    return GatewayError(
        "authentication",
        "this URL belongs to no running trajectory: it has ended, its lease was lost, or the token is wrong",
        code="dead_token",
    )


def as_gateway_error(error: BaseException) -> BaseException:
    """Return the error to answer for a failure; cancellations stay as they are."""
    if isinstance(error, GatewayError) or not isinstance(error, Exception):
        return error
    if isinstance(error, ContextFullError):
        return GatewayError("invalid", error.message, code="context_length_exceeded", param="messages")
    if isinstance(error, EngineRefusedError):
        return invalid(f"the engine refused the request: {error.message}", code="engine_refused")
    if isinstance(error, TrajectoryError):
        return GatewayError("invalid", error.message, code="cannot_render", param="messages", hint=error.hint)
    if isinstance(error, (FailureError, StoreUnavailableError)):
        return GatewayError("unavailable", error.message, code="unavailable", hint="send the request again")
    logger.error("a request failed", exc_info=error)
    return GatewayError(
        "internal", f"the gateway failed: {type(error).__name__}", code="internal", hint="see its log"
    )
