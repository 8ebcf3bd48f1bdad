"""Read the address of an environment's server, and ask it for its description when tasks are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from agentrl.documents.document import excerpt
from agentrl.errors import TaskFileError

CONNECT_SECONDS = 15.0
_EXCERPT = 200


def server_url(given: str, name: str) -> str:
    """Return an ``http(s)://`` address without a slash at its end. Raises TaskFileError."""
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        problem = f"url={given!r} is not an http:// or https:// address" if given else "url= is missing"
        raise TaskFileError(f"env:{name}: {problem}", hint=f"env:{name}?url=http://127.0.0.1:8000")
    return given.rstrip("/")


def get_json(url: str, what: str, token: Mapping[str, str] | None = None) -> Any:
    """Return the JSON of a page of ``what``. Raises TaskFileError if there is none."""
    import httpx2

    from agentrl.base.proxies import blocking_transport

    try:
        with httpx2.Client(
            timeout=CONNECT_SECONDS, follow_redirects=True, transport=blocking_transport(url)
        ) as client:
            answer = client.get(url, headers=token)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise TaskFileError(
            f"{what} cannot be reached: GET {url}: {type(error).__name__}: {error}",
            hint="start the server, or correct url=",
        ) from error
    try:
        found = answer.json() if answer.status_code == httpx2.codes.OK else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TaskFileError(
            f"{url} is not a page of {what}: it answered {answer.status_code}"
            f" {excerpt(answer.text, _EXCERPT)}",
            hint="url= is the address of the server, without a path such as /reset",
        )
    return found


def count(options: Mapping[str, str], option: str, name: str) -> int | None:
    """Return a number from 1 on; None if it is not given. Raises TaskFileError."""
    text = options.get(option)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise TaskFileError(f"env:{name}: {option}={text} is not a number from 1 on")
    return int(text)
