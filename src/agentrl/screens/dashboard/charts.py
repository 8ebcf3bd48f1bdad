"""Make charts, each a figure that the page's script draws and the same numbers as a table; a run's curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

import orjson
from markupsafe import Markup

from agentrl.config.agreement import per_process_flags
from agentrl.config.load import flag_names
from agentrl.config.schema import TrainConfig
from agentrl.documents.run import Evaluation, RunSettings, flags_at
from agentrl.documents.training import attempt_of
from agentrl.observe.metric_definitions import definition_of
from agentrl.observe.terminal import excerpt, finite, number
from agentrl.screens.dashboard.render import link
from agentrl.screens.views.pipelines import StepRow

MAX_POINTS = 600
"""Points of a curve; of a longer run, every n-th step is drawn, and always the last."""
SMOOTHINGS = {"0": 0.0, "0.5": 0.5, "0.8": 0.8, "0.9": 0.9, "0.95": 0.95, "0.99": 0.99}
"""What a page offers: the weight of the past in the moving average, by its text in the address."""
T = TypeVar("T")
_NATS = "nats per token"
Kind = Literal["line", "bar", "stack", "histogram"]
Value = float | int | None
_DASHES = (None, (9, 5), (2, 4), (9, 4, 2, 4), (16, 6), (16, 5, 2, 5))
"""Of lines by their order, in pixels: where two coincide, one shows through the gaps of the other."""
TABLE_ROWS = 50
"""Rows of a chart's table; of longer series it shows the last ones."""


class FlagChange(NamedTuple):
    """A step that was trained with other flags than the step before."""

    step: int
    text: str
    """``--learning_rate 0.001 → 0.0005``, for each flag that changed."""


def flag_changes(steps: Sequence[StepRow], starts: Sequence[RunSettings]) -> list[FlagChange]:
    """Return where the flags of the trainer changed, by the flags of all ``starts``.

    Without flags of other processes, and steps of the parent, whose starts are not known here.
    """
    found, unseen = [], per_process_flags().difference(flag_names(TrainConfig))
    for before, step in pairwise(step for step in steps if not step.inherited):
        old, new = (flags_at(starts, attempt_of(each.id)) for each in (before, step))
        if old is None or new is None or old is new:
            continue
        changed = [
            f"--{name} {excerpt(str(old.values[name]), 40)} → {excerpt(str(value), 40)}"
            for name, value in new.values.items()
            if name not in unseen and name in old.values and old.values[name] != value
        ]
        if changed:
            found.append(FlagChange(step.step, ", ".join(changed)))
    return found


@dataclass(frozen=True, kw_only=True)
class Series:
    """One named series of a chart: ``y`` over ``x``, of equal length. None and NaN are gaps."""

    name: str
    x: Sequence[Value]
    y: Sequence[Value]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart for the macro ``chart`` of ``macros.html``.

    ``stack`` adds the series up. ``histogram`` draws ``x`` as the bins' centers and ``y`` as their counts.
    """

    id: str
    """Unique in the page; letters, digits and dashes."""
    title: str
    series: Sequence[Series]
    kind: Kind = "line"
    x_title: str = "step"
    y_title: str = ""
    help: str = ""
    """One sentence: what it is, and what a healthy run shows."""
    y_range: tuple[float, float] | None = None
    log_y: bool = False
    link_of_x: str | None = None
    """Address that a click on a point opens, which the point's x completes: ``/runs/a/steps/``."""
    marks: Sequence[FlagChange] = ()
    """Drawn as dashed lines across the chart."""

    @property
    def empty(self) -> bool:
        """Whether no series has a value."""
        return not any(finite(value) is not None for series in self.series for value in series.y)

    def json(self) -> Markup:
        """Return the figure as JSON without a character that ends a script element."""
        figure = {
            "kind": self.kind,
            "x_title": self.x_title,
            "y_title": self.y_title,
            "y_range": self.y_range,
            "log_y": self.log_y,
            "link_of_x": self.link_of_x,
            "marks": [list(mark) for mark in self.marks],
            "series": [
                {"name": series.name, "dash": _DASHES[index % len(_DASHES)] if self.kind == "line" else None}
                for index, series in enumerate(self.series)
            ],
            "data": [[list(map(_rounded, values)) for values in (each.x, each.y)] for each in self.series],
        }
        text = orjson.dumps(figure).decode()
        for character in "<>&\u2028\u2029":
            text = text.replace(character, f"\\u{ord(character):04x}")
        return Markup(text)

    @property
    def columns(self) -> list[str]:
        """The column titles of the table."""
        return [self.x_title, *(series.name for series in self.series)]

    @property
    def rows(self) -> list[list[str]]:
        """The rows of the table: a value of x, and each series' value there."""
        table: dict[Value, list[str]] = {}
        for index, series in enumerate(self.series):
            for x, y in zip(series.x, series.y, strict=True):
                row = table.setdefault(
                    x, [number(x) if isinstance(x, float) else str(x), *[""] * len(self.series)]
                )
                row[index + 1] = number(y)
        return list(table.values())[-TABLE_ROWS:]


def _rounded(value: Value) -> float | int | None:
    found = finite(value)
    return float(f"{found:.6g}") if isinstance(found, float) else found


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One chart of step metrics: name of a series → key of the metric."""

    id: str
    title: str
    metrics: Mapping[str, str]
    help: str
    unit: str = ""
    kind: Kind = "line"
    log: bool = False
    share: bool = False
    """Whether its values lie in [0, 1]."""


CURVES: Sequence[Curve] = (
    Curve(id="reward", title="Reward and pass rate", metrics={"reward": "reward", "pass rate": "pass_rate"},
          help=f"Reward: {definition_of('reward')}. Both should rise."),
    Curve(id="kl", title="KL(μ‖π)", metrics={"KL(μ‖π)": "kl_k3", "KL(π‖reference)": "kl_reference"},
          help="How far the policy that sampled is from the one that trains. Healthy: below 0.01.",
          unit=_NATS),
    Curve(id="entropy", title="Entropy", metrics={"entropy": "entropy"},
          help="May fall slowly. Near 0, the policy no longer explores.", unit=_NATS),
    Curve(id="ratio", title="Importance ratio π/μ", metrics={"mean": "ratio_mean", "largest": "ratio_max"},
          help="The mean stays near 1.", log=True),
    Curve(id="staleness", title="Staleness", metrics={"mean": "staleness_mean", "largest": "staleness_max"},
          help="Optimizer steps between sampling and training. The mean is near --max_staleness.",
          unit="steps"),
    Curve(id="shares", title="Clipped and masked tokens",
          metrics={"clipped": "clipped_fraction", "masked": "masked_fraction", "capped": "capped_fraction"},
          help="Shares of the trained tokens. Healthy: a few percent."),
    Curve(id="agreeing", title="Abandoned",
          metrics={"groups": "abandoned_groups", "trajectories": "abandoned_fraction"},
          help="Share without training data, because all scores of a group agree or they are too old.",
          share=True),
    Curve(id="gradient", title="Gradient norm", metrics={"gradient norm": "grad_norm"},
          help="A jump names the step to look at: click on it."),
    Curve(id="sample-size", title="Effective sample size",
          metrics={"effective sample size": "effective_sample_size", "length bias": "length_bias"},
          help="1 on fresh data. Length bias below 1: training sees shorter trajectories than are sampled."),
    Curve(id="seconds", title="Where a step's seconds go",
          metrics={"wait for data": "seconds_data", "pack": "seconds_pack", "forward": "seconds_forward",
                   "backward": "seconds_backward", "optimizer": "seconds_optimizer",
                   "publish": "seconds_publish", "take the device": "seconds_device"},
          help="Much waiting: more samplers and engines. Little: a larger trainer.", unit="seconds",
          kind="stack"),
    Curve(id="speed", title="Throughput",
          metrics={"trained": "tokens_per_second", "without merging": "total_tokens_per_second"},
          help="Tokens that the trainer computes in a second.", unit="tokens/s"),
    Curve(id="queues", title="Queues",
          metrics={"groups open": "groups_open", "groups ready": "groups_ready"},
          help="Ready groups pile up: the trainer is slower than the samplers.", unit="groups"),
    Curve(id="prefix-cache", title="Prefix cache hit rate", metrics={"hit rate": "prefix_cache_hit_rate"},
          help="Share of prompt tokens that engines had cached.", share=True),
)  # fmt: skip


def curves(
    run: str, steps: Sequence[StepRow], smoothing: float = 0.0, marks: Sequence[FlagChange] = ()
) -> list[Chart]:
    """Return the charts that have a value, with ``marks``; a click on a point opens its step.

    ``smoothing`` is the weight of the past in the moving average that lines show; 0 shows the values.
    """
    charts = (replace(_chart(curve, {"": steps}, run, smoothing), marks=marks) for curve in CURVES)
    return [chart for chart in charts if not chart.empty]


def overlaid(runs: Mapping[str, Sequence[StepRow]], smoothing: float = 0.0) -> list[Chart]:
    """Return the charts of several runs, whose series carry the runs' names."""
    charts = (_chart(curve, runs, None, smoothing) for curve in CURVES if curve.kind == "line")
    return [chart for chart in charts if not chart.empty]


def evaluation_chart(evaluations: Sequence[Evaluation]) -> Chart:
    """Return the scores of the finished evaluations of policy versions over optimizer steps, by task file."""
    files: dict[str, list[tuple[int, float]]] = {}
    for item in evaluations:
        score = item.total.get("score") or {}
        value = score.get("value")
        if item.step is not None and isinstance(value, int | float):
            files.setdefault(item.file, []).append((item.step, value))
    return Chart(
        id="evaluations",
        title="Evaluation scores",
        help="Mean score of each evaluated version, by task file.",
        series=[
            Series(
                name=name, x=[step for step, _ in sorted(points)], y=[value for _, value in sorted(points)]
            )
            for name, points in files.items()
        ],
    )


def thin(values: Sequence[T]) -> list[T]:
    """Return at most ``MAX_POINTS`` values, evenly spaced, the last one among them."""
    stride = -(-len(values) // MAX_POINTS) if values else 1
    return list(reversed(values[::-1][::stride]))


def smooth(values: Sequence[float | None], weight: float) -> list[float | None]:
    """Return the exponential moving average, with ``weight`` in [0, 1) for the past; gaps stay gaps.

    The average begins at the first value, without a bias towards 0.
    """
    averaged: list[float | None] = []
    total = norm = 0.0
    for value in values:
        if value is None or not math.isfinite(value):
            averaged.append(None)
            continue
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        averaged.append(total / norm)
    return averaged


def _chart(curve: Curve, runs: Mapping[str, Sequence[StepRow]], run: str | None, smoothing: float) -> Chart:
    series = []
    for owner, steps in runs.items():
        for name, metric in curve.metrics.items():
            if not any(metric in step.metrics for step in steps):
                continue
            title = name if not owner else owner if len(curve.metrics) == 1 else f"{owner}: {name}"
            values = [step.metrics.get(metric) for step in steps]
            if smoothing and curve.kind == "line":
                values = smooth(values, smoothing)
            series.append(Series(name=title, x=thin([step.step for step in steps]), y=thin(values)))
    return Chart(
        id=curve.id,
        title=curve.title,
        series=series,
        help=curve.help,
        y_title=curve.unit,
        kind=curve.kind,
        log_y=curve.log,
        link_of_x=link("runs", run, "steps") + "/" if run else None,
        y_range=(0.0, 1.02) if curve.share else None,
    )
