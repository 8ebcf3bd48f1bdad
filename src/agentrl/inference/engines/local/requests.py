"""Read the JSON requests of the local engine, and answer those that are not valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse

from agentrl.errors import first_line


class BadRequestError(Exception):
    """The request is not valid; the answer has status 400."""


async def bad_request(_: Request, error: Exception) -> JSONResponse:
    """Answer a BadRequestError."""
    return JSONResponse({"error": {"message": str(error)}}, status_code=400)


async def refusal(_: Request, error: Exception) -> JSONResponse:
    """Answer an AgentRLError: what is served stays as it was."""
    return JSONResponse({"success": False, "message": first_line(error)}, status_code=400)


async def read_json(request: Request, **needed: type) -> dict[str, Any]:
    """Return the body, a JSON object; ``needed`` are the types of fields that it must have.

    Raises BadRequestError.
    """
    try:
        body = orjson.loads(await request.body())
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    if not all(isinstance(body.get(name), kind) for name, kind in needed.items()):
        fields = " and ".join(f"{name} ({kind.__name__})" for name, kind in needed.items())
        raise BadRequestError(f"{request.url.path} needs {fields}")
    return body


def read_ids(body: Mapping[str, Any], vocab_size: int, context_length: int) -> list[int]:
    """Return the prompt: ids of the vocabulary that leave a token of the context. Raises BadRequestError."""
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or any(type(item) is not int for item in ids):
        raise BadRequestError("generate needs input_ids: a list of at least one integer")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise BadRequestError(f"input_ids are outside the vocabulary of {vocab_size} ids")
    if len(ids) >= context_length:
        raise BadRequestError(
            f"a prompt of {len(ids)} tokens and one more do not fit the context of {context_length}"
        )
    return ids


def read_routed_from(body: Mapping[str, Any], prompt_tokens: int) -> int | None:
    """Return the first token whose experts are wanted; None if none are."""
    if not body.get("return_routed_experts"):
        return None
    start = body.get("routed_experts_start_len", 0)
    if type(start) is not int or not 0 <= start <= prompt_tokens:
        raise BadRequestError(f"routed_experts_start_len is {start!r}, outside [0, {prompt_tokens}]")
    return start
