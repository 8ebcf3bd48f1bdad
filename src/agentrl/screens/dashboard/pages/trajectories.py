"""The pages of trajectories: by filter, and one turn by turn with its texts, images and labels."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.status import SHOWN_STATUSES
from agentrl.errors import ImageError
from agentrl.screens.dashboard import serve
from agentrl.screens.dashboard.query import (
    BadQueryError,
    NotFoundError,
    checked_query,
    no_trajectory,
    read_form,
    whole,
)
from agentrl.screens.dashboard.render import link, render
from agentrl.screens.dashboard.stores import open_run
from agentrl.screens.turns import Shown, branch_views, contexts_of, part_text, shown, turns_of
from agentrl.screens.views.read import Views
from agentrl.screens.views.trajectories import TrajectoryOrder, TrajectorySearch
from agentrl.store.client import Store
from agentrl.store.mechanics.connection import RECORD

_TURNS = 40
"""Turns on one page."""
_OTHERS = 16
_IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif"})
_ROWS = 50
_HEAD = ("scorer", "score", "judge", "reply", "parts")
"""Keys of a score's details that a verdict shows by themselves."""


async def _trajectories(request: Request) -> Response:
    after = request.query_params.get("after")
    form = read_form(request.query_params)
    async with open_run(request) as store:
        search = TrajectorySearch(store.connection)
        with checked_query():
            page, count, labels = await asyncio.gather(
                search.page(form.wanted, order=form.order, limit=_ROWS, after=after),
                search.count(form.wanted),
                store.labels.counts(),
            )
        labels_of = await store.labels.of_records([row.id for row in page.rows])
    return render(
        request,
        "trajectories.html",
        run=store.run_name,
        section="trajectories",
        form=form,
        page=page,
        count=count,
        given_after=after,
        labels=labels,
        labels_of=labels_of,
        statuses=SHOWN_STATUSES,
        orders=[order.value for order in TrajectoryOrder],
    )


async def _trajectory(request: Request) -> Response:
    record_id = request.path_params["record"]
    start = whole(request.query_params, "from") or 0
    async with open_run(request) as store:
        trajectory = await Views(store.connection).whole_trajectory(record_id)
        if trajectory is None:
            holder = await store.ancestry.holder(RECORD, record_id)
            if holder is None:
                raise no_trajectory(store.run_name, record_id)
            return RedirectResponse(link("runs", holder, "trajectories", record_id))
        labels_of, may_label, known, others = await asyncio.gather(
            store.labels.of_records([record_id]),
            store.labels.may_write(),
            store.labels.counts(),
            _others(store, trajectory.record),
        )
    record, calls = trajectory.record, trajectory.calls
    if start and start >= len(calls):
        raise NotFoundError(f"trajectory {record_id!r} has {len(calls)} turns; from is {start}")
    turns = turns_of(record, calls[start : start + _TURNS], calls)
    token, cookie = serve.give_token(request) if may_label else (None, "")
    response = render(
        request, "trajectory.html", run=store.run_name, section="trajectories",
        record=record, trained_at_steps=trajectory.trained_at_steps, failures=trajectory.failures,
        others=others,
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
        serve.set_cookie(request, response, cookie)
    return response


async def _others(store: Store, record: Record) -> Sequence[Record]:
    """Return the other trajectories of the group, for the links that compare."""
    group = await store.records.by_task(record.task)
    return [other for other in group if other.id != record.id and other.turns][:_OTHERS]


async def _text(request: Request) -> Response:
    record_id, part = request.path_params["record"], request.query_params.get("part", "")
    index = whole(request.query_params, "call") or 0
    async with open_run(request) as store:
        trajectory = await Views(store.connection).whole_trajectory(record_id)
        if trajectory is None:
            raise no_trajectory(store.run_name, record_id)
    by_id = {call.id: call for call in trajectory.calls}
    call = by_id.get(f"{record_id}/{index}")
    if part == "query":
        text: str | None = trajectory.record.query
    elif part == "answer":
        text = trajectory.record.final_answer
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


async def _label(request: Request) -> Response:
    record_id = request.path_params["record"]
    form = await serve.posted_form(request)
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


def _score(given: str) -> float | None:
    if not given.strip():
        return None
    try:
        return float(given)
    except ValueError:
        raise BadQueryError(f"the score is {given[:80]!r}: give a number, or leave it empty") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One score, by whom, and the reasons."""

    scorer: str
    score: float | None
    when: str | None = None
    """``replaced`` or ``not applied``; None for the score that counts and its parts."""
    judge: str | None = None
    reply: Shown | None = None
    details: Shown | None = None


def verdicts_of(record: Record) -> list[ScoreRow]:
    """Return the score that counts with its parts, then later and earlier ones."""
    verdicts = []
    if record.score is not None or record.score_details:
        verdicts += list(_verdicts(record.score, record.score_details, None))
    if record.rescored is not None:
        details = record.rescored.get("details") or {}
        verdicts += list(_verdicts(record.rescored.get("score"), details, "later, not applied"))
    for earlier in reversed(record.score_history):
        verdicts += list(_verdicts(earlier.get("score"), earlier.get("details") or {}, "replaced"))
    if record.reported_reward is not None:
        reported = record.reported_reward
        verdicts += list(_verdicts(reported.score, reported.details, "reported by the agent"))
    return verdicts


def _verdicts(score: Any, details: Mapping[str, Any], when: str | None) -> Iterator[ScoreRow]:
    yield _verdict(str(details.get("scorer", "score")), score, details, when)
    parts = details.get("parts")
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        if isinstance(part, Mapping):
            yield _verdict(str(name), part.get("score"), part, when)


def _verdict(scorer: str, score: Any, details: Mapping[str, Any], when: str | None) -> ScoreRow:
    rest = {key: value for key, value in details.items() if key not in _HEAD}
    judge = details.get("judge")
    return ScoreRow(
        scorer=scorer,
        score=float(score) if isinstance(score, (int, float)) else None,
        when=when,
        judge=None if judge is None else str(judge),
        reply=None if judge is None else shown(details.get("reply", "")),
        details=shown(json.dumps(rest, ensure_ascii=False, default=str, indent=1)) if rest else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One thing that took time. ``start`` and ``end`` are fractions of the whole, from 0 to 1."""

    what: str
    kind: str
    """``generate``, ``tool`` or ``score``."""
    turn: int | None
    seconds: float
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """The bars of a trajectory over ``seconds``, in the order in which they began."""

    seconds: float
    bars: Sequence[Bar]


def waterfall_of(record: Record, calls: Sequence[DispatchedSamplingTask]) -> Waterfall:
    """Return the bars of a trajectory.

    A model call is stored when its tools have ended: its bars are counted back from then. Tools of a turn
    that ran at the same time share the turn's tool time.
    """
    begun = record.created_at
    spans: list[tuple[str, str, int | None, datetime, datetime]] = []
    for call in calls:
        tools = timedelta(seconds=max(call.tool_seconds, 0.0))
        generated = call.created_at - tools
        start = generated - timedelta(seconds=max(call.generate_seconds, 0.0))
        spans.append((f"turn {call.index + 1}", "generate", call.index + 1, start, generated))
        if call.tool_executions:
            names = ", ".join(dict.fromkeys(execution.name for execution in call.tool_executions))
            spans.append((names, "tool", call.index + 1, generated, call.created_at))
    if (scored := record.first_scored_at) is not None and record.completed_at is not None:
        spans.append(("scoring", "score", None, record.completed_at, max(record.completed_at, scored)))
    first = min([begun, *(span[3] for span in spans)])
    last = max([begun, *(span[4] for span in spans)])
    whole = max((last - first).total_seconds(), 1e-3)
    bars = [
        Bar(
            what=what, kind=kind, turn=turn, seconds=(end - start).total_seconds(),
            start=(start - first).total_seconds() / whole, end=(end - first).total_seconds() / whole,
        )
        for what, kind, turn, start, end in sorted(spans, key=lambda span: span[3])
    ]  # fmt: skip
    return Waterfall(seconds=whole, bars=bars)


routes = [
    Route("/runs/{run}/trajectories", _trajectories),
    Route("/runs/{run}/trajectories/{record:path}", _trajectory),
    Route("/runs/{run}/text/{record:path}", _text),
    Route("/runs/{run}/images/{sha256}", _image),
    Route("/runs/{run}/labels/{record:path}", _label, methods=["POST"]),
]
