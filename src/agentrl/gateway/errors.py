"""The errors that a gateway answers; each dialect writes them in its own shape."""

from __future__ import annotations

from typing import Literal

from agentrl.errors import AgentRLError

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
