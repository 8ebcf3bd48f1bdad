"""Tell an outage of what a Python tool reaches from an error of the tool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.errors import OutageError, ToolServerError, tool_server

_MAX_CAUSES = 10


@contextmanager
def outages_of(server: str) -> Iterator[None]:
    """Name ``server`` as what is down in each OutageError of the block."""
    try:
        yield
    except OutageError as error:
        error.outage = error.outage or tool_server(server)
        raise


@contextmanager
def unreachable_is_outage(server: str) -> Iterator[None]:
    """Make each ToolServerError of the block an outage of ``server`` if a connection or a time-out caused it.

    Its cause is a ConnectionError or a TimeoutError, or an error that one of these led to.
    """
    try:
        yield
    except ToolServerError as error:
        if error.outage is None and _is_unreachable(error):
            error.outage = tool_server(server)
        raise


def _is_unreachable(error: BaseException) -> bool:
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None or isinstance(cause, ConnectionError | TimeoutError):
            return cause is not None
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
