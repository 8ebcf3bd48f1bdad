"""Read the JSON requests of the local engine, and answer those that are not valid."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse


class BadRequestError(Exception):
    """The request is not valid; the answer has status 400."""


async def bad_request(_: Request, error: Exception) -> JSONResponse:
    """Answer a BadRequestError."""
    return JSONResponse({"error": {"message": str(error)}}, status_code=400)


async def read_json(request: Request) -> dict[str, Any]:
    """Return the body, a JSON object. Raises BadRequestError."""
    try:
        body = orjson.loads(await request.body())
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body
