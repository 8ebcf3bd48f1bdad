"""The page of one trajectory, turn by turn; the whole of a long text; the images."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.dashboard import csrf
from agentrl.dashboard.failures import NotFoundError
from agentrl.dashboard.query import no_trajectory, whole
from agentrl.dashboard.render import render
from agentrl.dashboard.stores import open_run
from agentrl.dashboard.views.text import shown
from agentrl.dashboard.views.trajectory import branch_views, contexts_of, part_text, turns_of
from agentrl.dashboard.views.verdicts import verdicts_of
from agentrl.dashboard.views.waterfall import waterfall_of
from agentrl.documents.record import Record
from agentrl.errors import ImageError
from agentrl.store.client import Store

_TURNS = 40
"""Turns on one page."""
_OTHERS = 16
_IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif"})


async def _trajectory(request: Request) -> Response:
    record_id = request.path_params["record"]
    start = whole(request, "from") or 0
    async with open_run(request) as store:
        found = await store.views.whole_trajectory(record_id)
        if found is None:
            raise no_trajectory(store.run_name, record_id)
        labels_of, may_label, known, others = await asyncio.gather(
            store.labels.of_records([record_id]),
            store.labels.may_write(),
            store.labels.counts(),
            _others(store, found.record),
        )
    record, calls = found.record, found.calls
    if start and start >= len(calls):
        raise NotFoundError(f"trajectory {record_id!r} has {len(calls)} turns; from is {start}")
    turns = turns_of(record, calls[start : start + _TURNS], calls)
    token, cookie = csrf.give_token(request) if may_label else (None, "")
    response = render(
        request, "trajectory.html", run=store.run_name, section="trajectories",
        record=record, trained_at_steps=found.trained_at_steps, failures=found.failures, others=others,
        question=shown(record.query),
        answer=None if record.final_answer is None else shown(record.final_answer),
        expected=None if record.answer is None else shown(record.answer),
        verdicts=verdicts_of(record), labels=labels_of.get(record_id, ()), known_labels=known, csrf=token,
        waterfall=waterfall_of(record, calls), contexts=contexts_of(calls),
        branches=branch_views(record, calls), turns=turns, start=start,
        earlier_turns=max(0, start - _TURNS) if start else None, page_turns=_TURNS,
        more_turns=start + _TURNS if start + _TURNS < len(calls) else None,
    )  # fmt: skip
    if may_label:
        csrf.set_cookie(request, response, cookie)
    return response


async def _others(store: Store, record: Record) -> Sequence[Record]:
    """Return the other trajectories of the group, for the links that compare."""
    group = await store.records.by_task(record.task)
    return [other for other in group if other.id != record.id and other.turns][:_OTHERS]


async def _text(request: Request) -> Response:
    record_id, part = request.path_params["record"], request.query_params.get("part", "")
    index = whole(request, "call") or 0
    async with open_run(request) as store:
        found = await store.views.whole_trajectory(record_id)
        if found is None:
            raise no_trajectory(store.run_name, record_id)
    by_id = {call.id: call for call in found.calls}
    call = by_id.get(f"{record_id}/{index}")
    if part == "query":
        text: str | None = found.record.query
    elif part == "answer":
        text = found.record.final_answer
    else:
        parent = by_id.get(call.parent) if call is not None and call.parent else None
        text = None if call is None else part_text(call, parent, part)
    if text is None:
        raise NotFoundError(f"turn {index + 1} of {record_id!r} has no part {part[:80]!r}")
    return render(
        request, "whole_text.html", run=store.run_name, section="trajectories", record_id=record_id,
        index=index, part=part, text=text,
    )  # fmt: skip


async def _image(request: Request) -> Response:
    key = request.path_params["sha256"]
    async with open_run(request) as store:
        try:
            image = (await store.images.get([key]))[key]
        except ImageError as error:
            raise NotFoundError(f"run {store.run_name!r} has no image {key[:80]!r}") from error
    media_type = image.media_type if image.media_type in _IMAGE_TYPES else "application/octet-stream"
    return Response(image.data, media_type=media_type, headers={"Cache-Control": "private, max-age=86400"})


routes = [
    Route("/runs/{run}/trajectories/{record:path}", _trajectory),
    Route("/runs/{run}/text/{record:path}", _text),
    Route("/runs/{run}/images/{sha256}", _image),
]
