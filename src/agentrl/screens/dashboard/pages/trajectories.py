"""The pages of trajectories: by filter, one turn by turn, its texts, images and labels, and its tokens."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from agentrl.chat.model_folder import read_tokenizer_file
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.status import SHOWN_STATUSES
from agentrl.errors import ImageError, ModelError
from agentrl.screens.dashboard.query import (
    BadQueryError,
    NotFoundError,
    checked_query,
    give_token,
    no_trajectory,
    posted_form,
    read_form,
    set_cookie,
    whole,
)
from agentrl.screens.dashboard.render import link, render
from agentrl.screens.dashboard.stores import open_run
from agentrl.screens.trajectory_page import (
    Shown,
    branch_views,
    contexts_of,
    event_view,
    other_text,
    owner_views,
    part_text,
    shown,
    turns_of,
)
from agentrl.screens.views.read import (
    NO_VERSION,
    CallTokens,
    StepValues,
    TokenReads,
    TrajectoryOrder,
    TrajectorySearch,
    TrajectoryTokens,
    Views,
)
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
    token, cookie = give_token(request) if may_label else (None, "")
    response = render(
        request, "trajectory.html", run=store.run_name, section="trajectories",
        record=record, trained_at_steps=trajectory.trained_at_steps, owners=owner_views(record),
        slot_records=[(other, other_text(other)) for other in trajectory.others], others=others,
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
        set_cookie(request, response, cookie)
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
    form = await posted_form(request)
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

    A model call has the time at which the last thing that followed it ended: its bars are counted back from
    then. Tools of a turn that ran at the same time share the turn's tool time.
    """
    begun = record.created_at
    spans: list[tuple[str, str, int | None, datetime, datetime]] = []
    for call in calls:
        tools = timedelta(seconds=max(call.tool_seconds, 0.0))
        after = [each.started_at for each in call.tool_executions if each.started_at is not None]
        # Prefer the clock: a tool may have begun under one owner, and the next under another one.
        generated = min(after) if after else call.created_at - tools - _event_seconds(call)
        start = generated - timedelta(seconds=max(call.generate_seconds, 0.0))
        spans.append((f"turn {call.index + 1}", "generate", call.index + 1, start, generated))
        if call.tool_executions:
            names = ", ".join(dict.fromkeys(execution.name for execution in call.tool_executions))
            spans.append((names, "tool", call.index + 1, generated, max(generated, call.created_at)))
        for event in call.events:
            ended = event.started_at + timedelta(seconds=max(event.seconds, 0.0))
            spans.append((event_view(event).what, "tool", call.index + 1, event.started_at, ended))
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


def _event_seconds(call: DispatchedSamplingTask) -> timedelta:
    return timedelta(seconds=sum(max(event.seconds, 0.0) for event in call.events))


LEVELS: Final = 8
"""Steps of a colour scale, from 0."""
PAGE: Final = 2000
"""Tokens on one page."""
_LOGPROB_FLOOR = -6.0
_ENTROPY_CEILING = 4.0
"""Entropies above this, in nats, have the last level; exp(4) is 55 equally likely tokens."""
_DRIFTS = (0.02, 0.1, 0.3, 1.0)
"""Absolute log-ratios, in nats, from which a token has the levels 1 to 4."""
_LARGEST_LOG_RATIO = 700.0
"""Its exp is still a float."""
_MAX_TOKENIZER_BYTES = 64 * 2**20


class Colour(StrEnum):
    """The value that colours a token."""

    LOGPROB = "logprob"
    ADVANTAGE = "advantage"
    VERSION = "version"
    TRAINED = "trained"
    RATIO = "ratio"
    ENTROPY = "entropy"

    @property
    def is_of_step(self) -> bool:
        """Return whether a step computed this value."""
        return self in (Colour.RATIO, Colour.ENTROPY)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One generated token. ``level`` is None where the value is missing."""

    index: int
    id: int
    text: str
    logprob: float | None
    version: int | None
    advantage: float | None
    log_ratio: float | None = None
    """log πθ − log μ in the chosen step, in nats."""
    entropy: float | None = None
    """In the chosen step, in nats."""
    level: str | None
    """``s0`` … ``s7`` of a scale, ``n1`` … ``n4`` below and ``p0`` … ``p4`` above zero, ``v0`` … ``v7``."""

    @property
    def ratio(self) -> float | None:
        """Return πθ/μ."""
        return None if self.log_ratio is None else math.exp(min(self.log_ratio, _LARGEST_LOG_RATIO))

    @property
    def detail(self) -> str:
        """Return all values in words, for a pointer, a keyboard and a screen reader."""
        parts = [f"token {self.index}", f"id {self.id}"]
        if self.logprob is None:
            parts.append("no logprob")
        else:
            parts.append(f"logprob {self.logprob:.3f} (probability {math.exp(min(self.logprob, 0.0)):.3g})")
        parts.append("version unknown" if self.version is None else f"policy version {self.version}")
        parts.append("not trained" if self.advantage is None else f"trained, advantage {self.advantage:+.3f}")
        if self.log_ratio is not None:
            parts.append(f"ratio {self.ratio:.4g} (log-ratio {self.log_ratio:+.4f} nats)")
        if self.entropy is not None:
            parts.append(f"entropy {self.entropy:.3f} nats")
        return " · ".join(parts)


def token_views(
    tokens: CallTokens,
    colour: Colour,
    decode: Callable[[int], str] | None,
    start: int = 0,
    values: StepValues | None = None,
) -> list[TokenView]:
    """Return up to ``PAGE`` tokens of a model call from ``start`` on; ``values`` are those of a step."""
    end = min(start + PAGE, len(tokens.ids))
    largest = float(np.nanmax(np.abs(tokens.advantages), initial=0.0))
    versions = sorted(set(tokens.versions.tolist()))
    views = []
    for index in range(start, end):
        token_id = int(tokens.ids[index])
        logprob, advantage = _number(tokens.logprobs[index]), _number(tokens.advantages[index])
        log_ratio = None if values is None else _number(values.log_ratios[index])
        entropy = None if values is None else _number(values.entropies[index])
        version = int(tokens.versions[index])
        level = (
            _level_of_step(colour, log_ratio, entropy)
            if colour.is_of_step
            else _level(colour, logprob, advantage, version, largest, versions)
        )
        views.append(
            TokenView(
                index=index,
                id=token_id,
                text=f"[{token_id}]" if decode is None else decode(token_id),
                logprob=logprob,
                version=None if version == NO_VERSION else version,
                advantage=advantage,
                log_ratio=log_ratio,
                entropy=entropy,
                level=level,
            )
        )
    return views


def _level(
    colour: Colour,
    logprob: float | None,
    advantage: float | None,
    version: int,
    largest: float,
    versions: Sequence[int],
) -> str | None:
    if colour is Colour.LOGPROB and logprob is not None:
        share = max(0.0, min(1.0, logprob / _LOGPROB_FLOOR))
        return f"s{min(int(share * LEVELS), LEVELS - 1)}"
    if colour is Colour.ADVANTAGE and advantage is not None:
        strength = math.ceil(4 * abs(advantage) / largest) if largest > 0 else 0
        return f"{'n' if advantage < 0 else 'p'}{strength}"
    if colour is Colour.VERSION and version != NO_VERSION:
        return f"v{versions.index(version) % LEVELS}"
    if colour is Colour.TRAINED:
        return None if advantage is None else "p3"
    return None


def _level_of_step(colour: Colour, log_ratio: float | None, entropy: float | None) -> str | None:
    if colour is Colour.RATIO and log_ratio is not None:
        strength = sum(abs(log_ratio) >= edge for edge in _DRIFTS)
        return f"{'n' if log_ratio < 0 and strength else 'p'}{strength}"
    if colour is Colour.ENTROPY and entropy is not None:
        return f"s{max(0, min(int(entropy / _ENTROPY_CEILING * LEVELS), LEVELS - 1))}"
    return None


@lru_cache(maxsize=4)
def decoder(folder: str) -> Callable[[int], str] | None:
    """Return the function from a token id to its text; None if this machine can read no tokenizer there."""
    path = Path(folder) / "tokenizer.json"
    try:
        if path.stat().st_size > _MAX_TOKENIZER_BYTES:
            return None
        tokenizer = read_tokenizer_file(path)
    except (OSError, ModelError, ValueError, ModuleNotFoundError):
        return None

    def text(token_id: int) -> str:
        if not 0 <= token_id < tokenizer.get_vocab_size(with_added_tokens=True):
            return f"[{token_id}]"
        decoded = tokenizer.decode([token_id], skip_special_tokens=False)
        return decoded if decoded and "\ufffd" not in decoded else tokenizer.id_to_token(token_id) or ""

    return text


def _number(value: np.float32) -> float | None:
    return float(value) if np.isfinite(value) else None


def legend_of(tokens: CallTokens, colour: Colour) -> list[tuple[str, str]]:
    """Return the levels of the scale with their meaning."""
    if colour is Colour.LOGPROB:
        edges = [_LOGPROB_FLOOR * level / LEVELS + 0.0 for level in range(LEVELS + 1)]  # no "-0"
        shown = [(f"s{level}", f"{edges[level]:g} to {edges[level + 1]:g}") for level in range(LEVELS - 1)]
        return [*shown, (f"s{LEVELS - 1}", f"below {edges[LEVELS - 1]:g}: the model was surprised")]
    if colour is Colour.ADVANTAGE:
        return [("n4", "made less likely"), ("n1", "a little"), ("p0", "advantage 0"), ("p1", "a little"),
                ("p4", "made more likely")]  # fmt: skip
    if colour is Colour.VERSION:
        versions = sorted(set(tokens.versions.tolist()))
        return [
            (f"v{index % LEVELS}", f"version {version}")
            for index, version in enumerate(versions)
            if version != NO_VERSION
        ]
    if colour is Colour.TRAINED:
        return [("p3", "in the training data")]
    if colour is Colour.RATIO:
        return _ratio_legend()
    edges = [_ENTROPY_CEILING * level / LEVELS for level in range(LEVELS)]
    shown = [(f"s{level}", f"{edges[level]:g} to {edges[level + 1]:g} nats") for level in range(LEVELS - 1)]
    return [*shown, (f"s{LEVELS - 1}", f"above {edges[-1]:g} nats: the policy is uncertain")]


def _ratio_legend() -> list[tuple[str, str]]:
    """Return the levels of the ratio: less likely than at sampling, equally, more likely."""
    below = [math.exp(-edge) for edge in _DRIFTS]
    above = [math.exp(edge) for edge in _DRIFTS]
    return [
        ("n4", f"ratio below {below[3]:.2g}: much less likely than at sampling"),
        *((f"n{level}", f"{below[level]:.2g} to {below[level - 1]:.2g}") for level in (3, 2, 1)),
        ("p0", f"{below[0]:.2g} to {above[0]:.3g}: as at sampling"),
        *((f"p{level}", f"{above[level - 1]:.3g} to {above[level]:.3g}") for level in (1, 2, 3)),
        ("p4", f"above {above[3]:.3g}: much more likely than at sampling"),
    ]


async def _tokens(request: Request) -> Response:
    record_id = request.path_params["record"]
    given = request.query_params.get("colour", Colour.LOGPROB.value)
    if given not in {colour.value for colour in Colour}:
        raise BadQueryError(f"colour is {given[:80]!r}: choose one of {', '.join(Colour)}")
    colour = Colour(given)
    start, named_step = whole(request.query_params, "start") or 0, whole(request.query_params, "step")
    async with open_run(request) as store:
        trajectory = await TokenReads(store.connection).trajectory(record_id)
    if trajectory is None:
        raise no_trajectory(store.run_name, record_id)
    chosen = _chosen(request, trajectory)
    stored = sorted({step for each in trajectory.calls for step in each.values})
    step = named_step if named_step is not None else max(stored, default=None)

    def here(**changes: Any) -> str:
        index = chosen.call.index if chosen else None
        kept: dict[str, Any] = {"colour": colour.value, "call": index, "step": named_step, **changes}
        return link("runs", store.run_name, "tokens", record_id, **kept)

    page = await asyncio.to_thread(_page, trajectory, chosen, colour, start, step)
    return render(
        request, "tokens.html", run=store.run_name, section="trajectories", record=trajectory.record,
        colour=colour, colours=list(Colour), here=here, calls=[each.call for each in trajectory.calls],
        call=chosen.call if chosen else None, steps=trajectory.steps, data_status=trajectory.data_status,
        start=start, page_size=PAGE, stored_steps=stored, step=step, **page,
    )  # fmt: skip


def _chosen(request: Request, trajectory: TrajectoryTokens) -> CallTokens | None:
    """Return the tokens of the turn that the address names; of the first turn with tokens without one."""
    if "call" in request.query_params:
        index = whole(request.query_params, "call") or 0
        named = next((each for each in trajectory.calls if each.call.index == index), None)
        if named is None:
            raise NotFoundError(f"trajectory {trajectory.record.id!r} has no turn {index + 1}")
        return named
    return next((each for each in trajectory.calls if len(each.ids)), None)


def _page(
    trajectory: TrajectoryTokens, chosen: CallTokens | None, colour: Colour, start: int, step: int | None
) -> dict[str, Any]:
    """Return what the template shows of the chosen turn, with the values that ``step`` stored."""
    if chosen is None:
        return {"tokens": (), "total": 0, "trained": 0, "has_text": True, "legend": ()}
    decode = _decode(trajectory, chosen)
    return {
        "tokens": token_views(chosen, colour, decode, start, chosen.values.get(-1 if step is None else step)),
        "total": len(chosen.ids),
        "trained": int(np.isfinite(chosen.advantages).sum()),
        "has_text": decode is not None,
        "legend": legend_of(chosen, colour),
    }


def _decode(trajectory: TrajectoryTokens, chosen: CallTokens) -> Callable[[int], str] | None:
    versions: Sequence[int] = [span.version for span in chosen.call.versions]
    others = trajectory.locations.keys() - set(versions)
    folders = [trajectory.locations[v] for v in (*versions, *others) if v in trajectory.locations]
    return next((decode for folder in folders if (decode := decoder(folder)) is not None), None)


routes = [
    Route("/runs/{run}/trajectories", _trajectories),
    Route("/runs/{run}/trajectories/{record:path}", _trajectory),
    Route("/runs/{run}/text/{record:path}", _text),
    Route("/runs/{run}/images/{sha256}", _image),
    Route("/runs/{run}/labels/{record:path}", _label, methods=["POST"]),
    Route("/runs/{run}/tokens/{record:path}", _tokens),
]
