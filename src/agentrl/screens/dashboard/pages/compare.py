"""The pages that compare runs, two policy versions of a run, and two trajectories of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.run import RunSettings
from agentrl.observe.terminal import number
from agentrl.screens.dashboard.charts import SMOOTHINGS, overlaid
from agentrl.screens.dashboard.query import BadQueryError, NotFoundError, choice, no_trajectory, whole
from agentrl.screens.dashboard.render import render
from agentrl.screens.dashboard.stores import cache_of, open_run, read_runs, reader_of
from agentrl.screens.snapshot import TRAIN, mean_of_last
from agentrl.screens.trajectory_page import MAX_CHARS, whole_message
from agentrl.screens.views.counts import VersionScores, VersionSummary
from agentrl.screens.views.pipelines import StepRow
from agentrl.screens.views.read import Views, WholeTrajectory

_TURNS = 60
MAX_RUNS = 8
"""Runs whose curves are drawn over each other."""
_RUNS_SECONDS = 10.0
_VERSION_SECONDS = 120.0
_VERSIONS = 500
_TASKS = 20
_METRICS = (
    ("reward", "reward"), ("pass_rate", "pass rate"), ("entropy", "entropy"), ("kl_k3", "KL(μ‖π)"),
    ("grad_norm", "gradient norm"), ("staleness_mean", "staleness"), ("abandoned_groups", "abandoned groups"),
    ("tokens_per_second", "trained tokens/s"),
)  # fmt: skip
_ROWS = (
    ("trajectories", "trajectories"), ("scored", "scored"), ("failed", "failed"), ("score", "mean score"),
    ("right", "score above 0.5"), ("generated_tokens", "generated tokens"), ("turns", "turns"),
    ("tool_calls", "tool calls"), ("seconds", "seconds, claim to score"),
)  # fmt: skip


async def _runs(request: Request) -> Response:
    known = [run.name for run in await read_runs(request, _RUNS_SECONDS) if run.problem is None]
    smoothing = choice(request.query_params, "smoothing", SMOOTHINGS, "0")
    given = request.query_params.getlist("run")
    chosen = list(dict.fromkeys(name.strip()[:200] for name in given if name.strip()))
    if len(chosen) < len(given) or len(chosen) == 1 or len(chosen) > MAX_RUNS:
        raise BadQueryError(f"{len(chosen)} different runs are given: choose 2 to {MAX_RUNS}")
    steps: dict[str, list[StepRow]] = {}
    configurations: list[Mapping[str, RunSettings]] = []
    for name in chosen:
        async with open_run(request, name) as store:
            steps[name] = await reader_of(request, store).steps()
            configurations.append(await store.settings.resolved())
    figures = overlaid(steps, SMOOTHINGS[smoothing])
    return render(
        request,
        "compare_runs.html",
        charts=bool(figures),
        names=sorted({*known, *chosen}),
        chosen=chosen,
        figures=figures,
        rows=_ends(list(steps.values())),
        common=_common(list(steps.values())),
        flags=_differences(configurations),
        smoothing=smoothing,
        smoothings=SMOOTHINGS,
    )


def _common(runs: Sequence[Sequence[StepRow]]) -> int:
    """Return the last step that all runs with a step have; 0 without one."""
    return min((steps[-1].step for steps in runs if steps), default=0)


def _ends(runs: Sequence[Sequence[StepRow]]) -> list[dict[str, Any]]:
    """Return the metrics of each run at the last step that all have, then those at its own last step."""
    common = _common(runs)
    rows = []
    for key, name in _METRICS:
        until = [[step for step in steps if step.step <= common] for steps in runs]
        values = [mean_of_last(steps, key) for steps in (*until, *runs)]
        if any(value is not None for value in values):
            rows.append({"name": name, "values": values})
    return rows


def _differences(runs: Sequence[Mapping[str, RunSettings]]) -> list[tuple[str, str, list[Any]]]:
    """Return (role, flag, value in each run) of each flag that all runs have, with more than one value."""
    roles = [{role: item.values for role, item in run.items()} for run in runs]
    shared = [role for role in (roles[0] if roles else ()) if all(role in each for each in roles)]
    return [
        (role, name, values)
        for role in shared
        for name in sorted(roles[0][role])
        if all(name in each[role] for each in roles)
        for values in [[each[role][name] for each in roles]]
        if any(value != values[0] for value in values)
    ]


async def _versions(request: Request) -> Response:
    split = request.query_params.get("split", TRAIN)
    async with open_run(request) as store:
        versions = VersionScores(store.connection)
        published = await versions.published(_VERSIONS)
        numbers = [version.id for version in published]
        sampled = await versions.newest_sampled(split)
        newest = sampled if sampled in numbers else next(iter(numbers), 0)
        b = whole(request.query_params, "b", newest) or 0
        a = whole(request.query_params, "a", max(0, newest - 10)) or 0
        summaries = [await _summary(request, versions, store.run_name, number, split) for number in (a, b)]
        if numbers and any(summary is None for summary in summaries):
            missing = a if summaries[0] is None else b
            raise NotFoundError(f"run {store.run_name!r} has no policy version {missing}")
        key = ("outcomes", store.run_name, a, b, split)
        tasks = await cache_of(request).get(
            key, _VERSION_SECONDS, lambda: versions.outcomes([a, b] if a != b else [], split)
        )
    changed = sorted(tasks.items(), key=lambda item: item[1][b] - item[1][a])
    return render(
        request,
        "compare_versions.html",
        run=store.run_name,
        section="compare",
        published=published,
        split=split,
        a=a,
        b=b,
        summaries=[summary for summary in summaries if summary is not None],
        rows=_ROWS,
        tasks=len(tasks),
        worse=[item for item in changed[:_TASKS] if item[1][b] < item[1][a]],
        better=[item for item in changed[::-1][:_TASKS] if item[1][b] > item[1][a]],
    )


async def _summary(
    request: Request, versions: VersionScores, run: str, number: int, split: str
) -> VersionSummary | None:
    key = ("version", run, number, split)
    return await cache_of(request).get(key, _VERSION_SECONDS, lambda: versions.summary(number, split))


async def _pair(request: Request) -> Response:
    query = request.query_params
    ids = query.getlist("id") or [query[name] for name in ("a", "b") if name in query]
    if len(ids) != 2 or ids[0] == ids[1]:
        raise BadQueryError(f"{len(set(ids))} trajectories are marked: mark two on the page of trajectories")
    both: list[WholeTrajectory] = []
    async with open_run(request) as store:
        views = Views(store.connection)
        for record_id in ids:
            trajectory = await views.whole_trajectory(record_id)
            if trajectory is None:
                raise no_trajectory(store.run_name, record_id)
            both.append(trajectory)
    pairs = pair_turns(both[0].calls, both[1].calls)
    return render(
        request, "compare_trajectories.html", run=store.run_name, section="trajectories",
        records=[each.record for each in both], facts=_facts(both), pairs=pairs[:_TURNS],
        parted=next((pair for pair in pairs if pair.parts_here), None), cut=max(0, len(pairs) - _TURNS),
    )  # fmt: skip


def _facts(both: list[WholeTrajectory]) -> list[tuple[str, list[str]]]:
    records = [each.record for each in both]
    rows: list[tuple[str, list[object]]] = [
        ("Status", [record.status for record in records]),
        ("Score", [number(record.score) for record in records]),
        ("Advantage", [number(record.advantage) for record in records]),
        ("Answer", ["–" if record.final_answer is None else record.final_answer for record in records]),
        ("Stopped", [record.stop_reason or "–" for record in records]),
        ("Turns", [record.turns for record in records]),
        ("Tool calls", [record.tool_calls for record in records]),
        ("Generated tokens", [number(record.generated_tokens) for record in records]),
        ("Policy versions", [f"{record.min_version} to {record.max_version}" for record in records]),
        ("Trained at steps", [", ".join(map(str, each.trained_at_steps)) or "none" for each in both]),
    ]
    return [(name, [str(value) for value in values]) for name, values in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one trajectory generated in a turn: the beginning that both share, and the rest."""

    same: str
    rest: str
    chars: int

    @property
    def is_cut(self) -> bool:
        """Return whether the page shows only the beginning."""
        return self.chars > MAX_CHARS


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPair:
    """The same turn of two trajectories; a side is None where its trajectory has ended."""

    number: int
    left: Side | None
    right: Side | None
    is_same: bool
    parts_here: bool
    """Whether it is the first turn that differs."""


def pair_turns(
    left: Sequence[DispatchedSamplingTask], right: Sequence[DispatchedSamplingTask]
) -> list[TurnPair]:
    """Return the turns of two trajectories side by side."""
    pairs: list[TurnPair] = []
    has_parted = False
    for turn, (one, other) in enumerate(zip_longest(left, right), 1):
        texts = [None if call is None else _generated(call) for call in (one, other)]
        is_same = texts[0] == texts[1]
        shared = _shared(*(text or "" for text in texts)) if not has_parted else 0
        pairs.append(
            TurnPair(
                number=turn,
                left=_side(texts[0], shared),
                right=_side(texts[1], shared),
                is_same=is_same,
                parts_here=not is_same and not has_parted,
            )
        )
        has_parted = has_parted or not is_same
    return pairs


def _side(text: str | None, shared: int) -> Side | None:
    if text is None:
        return None
    cut = text[:MAX_CHARS]
    return Side(same=cut[:shared], rest=cut[shared:], chars=len(text))


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with together."""
    differing = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _generated(call: DispatchedSamplingTask) -> str:
    """Return what the model generated in a turn, and what its tools answered, as text."""
    results = [f"← {execution.text}" for execution in call.tool_executions]
    return "\n".join(filter(None, [whole_message(call.response), *results]))


routes = [Route("/compare", _runs), Route("/runs/{run}/compare", _versions), Route("/runs/{run}/pair", _pair)]
