"""Read the address of an environment: its options and its server, which is asked for its description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from agentrl.base.validation import SettingsModel, read_config, wrong
from agentrl.documents.document import excerpt
from agentrl.errors import TaskFileError

CONNECT_SECONDS = 15.0
_EXCERPT = 200

T = TypeVar("T", bound=SettingsModel)


def _json_object(text: str) -> str:
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise wrong('a JSON object, such as {"difficulty": "easy"}')
    return text


def _digits(text: str) -> str:
    # Not as int() reads it: 1_000 and 1.0 are slips of the hand.
    if not (text.isascii() and text.isdigit()):
        raise wrong("a whole number")
    return text


Digits = Annotated[int, BeforeValidator(_digits)]
FromOne = Annotated[Digits, Field(ge=1)]
JsonObject = Annotated[str, AfterValidator(_json_object)]
"""The text of a JSON object."""


def read_options(kind: type[T], given: Mapping[str, str], name: str, example: str) -> T:
    """Return the options of an address of environment ``name``. Raises TaskFileError."""
    return read_config(kind, given, f"env:{name}", hint=example, error=TaskFileError)


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
