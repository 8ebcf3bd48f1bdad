"""Take a person's label of a trajectory: the only page that writes, and only with an annotator's rights."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from agentrl.dashboard import csrf
from agentrl.dashboard.failures import BadQueryError
from agentrl.dashboard.query import checked_query, no_trajectory
from agentrl.dashboard.render import link
from agentrl.dashboard.stores import open_run

_MAX_BYTES = 64 * 1024
_MAX_SECONDS = 30.0


async def _label(request: Request) -> Response:
    record_id = request.path_params["record"]
    form = await _form(request)
    csrf.check(request, form.get(csrf.FIELD, ""))
    by = form.get("by", "")
    async with open_run(request) as store:
        if not await store.labels.may_write():
            raise HTTPException(
                HTTPStatus.FORBIDDEN,
                "The dashboard may not write labels: start it as agentrl_annotator (agentrl db users).",
            )
        if await store.records.get(record_id) is None:
            raise no_trajectory(store.run_name, record_id)
        if form.get("remove"):
            await store.labels.remove(record_id, by=by)
        else:
            with checked_query():
                await store.labels.put(
                    record_id, by=by, label=form.get("label", ""), note=form.get("note", ""),
                    score=_score(form.get("score", "")),
                )  # fmt: skip
    here = link("runs", store.run_name, "trajectories", record_id)
    return RedirectResponse(f"{here}#labels", HTTPStatus.SEE_OTHER)


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of the posted form.

    Raises HTTPException 413 for a body above 64 KiB, 408 for one that takes longer than 30 seconds.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_MAX_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise HTTPException(
                        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The form has more than {_MAX_BYTES:,} bytes."
                    )
    except TimeoutError:
        raise HTTPException(
            HTTPStatus.REQUEST_TIMEOUT, f"The form did not arrive within {_MAX_SECONDS:.0f} s."
        ) from None
    try:
        fields = parse_qs(body.decode("utf-8"), keep_blank_values=True, max_num_fields=20)
    except ValueError as error:
        raise BadQueryError("the form cannot be read") from error
    return {name: given[-1] for name, given in fields.items()}


def _score(given: str) -> float | None:
    if not given.strip():
        return None
    try:
        return float(given)
    except ValueError:
        raise BadQueryError(f"the score is {given[:80]!r}: give a number, or leave it empty") from None


routes = [Route("/runs/{run}/labels/{record:path}", _label, methods=["POST"])]
