"""Charts as JSON and as tables, and the thinning of long curves."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime

import pytest

from agentrl.documents.status import StepStatus
from agentrl.screens.dashboard.charts import MAX_POINTS, Chart, Series, curves, overlaid, smooth, thin
from agentrl.screens.views.pipelines import StepRow


def _step(number: int, **metrics: float) -> StepRow:
    return StepRow(
        id=f"1/{number}", step=number, status=StepStatus.COMMITTED, policy_version=number - 1, owner="t",
        trajectories=0, groups=0, planned_at=datetime(2026, 1, 1, tzinfo=UTC), metrics=metrics,
    )  # fmt: skip


def test_a_figure_cannot_end_its_script_element() -> None:
    name = "</script><script>alert(1)</script>\u2028<b>"
    chart = Chart(id="a", title="t", series=[Series(name=name, x=[1], y=[2.0])])
    text = str(chart.json())
    assert not set("<>\u2028") & set(text)
    assert json.loads(text)["series"][0]["name"] == name


def test_what_is_no_finite_number_is_a_gap() -> None:
    chart = Chart(id="a", title="t", series=[Series(name="s", x=[1, 2, 3], y=[math.nan, None, 1.23456789])])
    assert json.loads(str(chart.json()))["data"][0][1] == [None, None, 1.23457]
    assert not chart.empty
    assert Chart(id="a", title="t", series=[Series(name="s", x=[1], y=[float("inf")])]).empty


def test_the_table_joins_series_by_x() -> None:
    series = [Series(name="p", x=[1, 2], y=[5, 6]), Series(name="q", x=[2], y=[0.5])]
    chart = Chart(id="a", title="t", series=series)
    assert chart.columns == ["step", "p", "q"]
    assert chart.rows == [["1", "5", ""], ["2", "6", "0.500"]]


def test_a_long_curve_keeps_its_last_step() -> None:
    steps = [_step(number) for number in range(1, 2 * MAX_POINTS + 2)]
    thinned = thin(steps)
    assert len(thinned) <= MAX_POINTS
    assert thinned[-1] is steps[-1]
    assert thin([]) == []


def test_smoothing_is_a_moving_average_without_bias_whose_gaps_stay() -> None:
    assert smooth([1.0, None, 3.0, math.nan], 0.5) == [1.0, None, pytest.approx(7 / 3), None]
    assert smooth([1.0, 2.0], 0.0) == [1.0, 2.0]
    steps = [_step(number, reward=number % 2) for number in range(1, 1001)]
    (chart,) = curves("r", steps, 0.99)
    assert len(chart.series[0].y) <= 600
    assert chart.series[0].y[-1] == pytest.approx(0.5, abs=0.01)


def test_lines_that_coincide_differ_in_their_dashes() -> None:
    (chart,) = overlaid({name: [_step(1, entropy=0.5)] for name in "abc"})
    dashes = [series["dash"] for series in json.loads(chart.json())["series"]]
    assert len({str(dash) for dash in dashes}) == 3


def test_only_curves_with_values_are_drawn() -> None:
    assert [chart.id for chart in curves("r", [_step(1, reward=0.5)])] == ["reward"]
    both = overlaid({"a": [_step(1, reward=0.5, entropy=1.0)], "b": [_step(1, reward=0.7)]})
    assert [[series.name for series in chart.series] for chart in both] == [["a: reward", "b: reward"], ["a"]]
