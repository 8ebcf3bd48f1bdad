"""Read the query of a request; what is wrong becomes a page with status 400 or 404 that says so."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from agentrl.dashboard.failures import BadQueryError, NotFoundError
from agentrl.dashboard.render import same_page
from agentrl.errors import ConfigError

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
    request: Request, name: str, default: int | None = None, *, low: int = 0, high: int = 2**31
) -> int | None:
    """Return a query parameter as a whole number; ``default`` without one. Raises BadQueryError."""
    text = request.query_params.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and low <= int(text) <= high):
        raise BadQueryError(f"{name} is {text[:80]!r}; give a whole number from {low} to {high}")
    return int(text)


def choice(request: Request, name: str, choices: Collection[str], default: str) -> str:
    """Return a query parameter that has one of ``choices``; ``default`` without one. Raises BadQueryError."""
    text = request.query_params.get(name, "")
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
    page = whole(request, "page", 1, low=1, high=_MAX_PAGE) or 1
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
