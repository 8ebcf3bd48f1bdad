"""What the dashboard's pages compute and how they show it: tokens, comparisons, filters, texts, charts."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from jinja2 import nodes
from snapshots import short_call as call

from agentrl.documents.document import now
from agentrl.documents.run import RunSettings, flags_key
from agentrl.documents.status import StepStatus
from agentrl.observe.terminal import MISSING
from agentrl.screens.dashboard import render
from agentrl.screens.dashboard.charts import (
    MAX_POINTS,
    Chart,
    Series,
    curves,
    flag_changes,
    overlaid,
    smooth,
    thin,
)
from agentrl.screens.dashboard.pages.compare import pair_turns
from agentrl.screens.dashboard.pages.runs import histogram
from agentrl.screens.dashboard.pages.scores import VALUES, dependence, disagreements, edges, repeated_answers
from agentrl.screens.dashboard.pages.trajectories import PAGE, Colour, decoder, legend_of, token_views
from agentrl.screens.dashboard.query import BadQueryError, read_form
from agentrl.screens.dashboard.render import ago, excerpt, sparkline, visible
from agentrl.screens.views.counts import ScoredRow
from agentrl.screens.views.pipelines import StepRow
from agentrl.screens.views.read import CallTokens, StepValues


def tokens_of(advantages: list[float], logprobs: list[float]) -> CallTokens:
    return CallTokens(
        call=call(0, None), ids=np.asarray([7, 8, 9], np.int32), logprobs=np.asarray(logprobs, np.float32),
        versions=np.asarray([1, 1, -1], np.int32), advantages=np.asarray(advantages, np.float32),
    )  # fmt: skip


def test_a_token_has_a_level_of_the_chosen_value_and_all_values_in_words() -> None:
    nan = float("nan")
    tokens = tokens_of([0.5, -1.0, nan], [0.0, -60.0, nan])
    levels = {colour: [view.level for view in token_views(tokens, colour, None)] for colour in Colour}
    assert levels == {
        Colour.LOGPROB: ["s0", "s7", None], Colour.ADVANTAGE: ["p2", "n4", None],
        Colour.VERSION: ["v1", "v1", None], Colour.TRAINED: ["p3", "p3", None],
        Colour.RATIO: [None] * 3, Colour.ENTROPY: [None] * 3,
    }  # fmt: skip
    views = token_views(tokens, Colour.LOGPROB, lambda number: "\x1b" * (number == 8) or "a")
    assert [view.text for view in views] == ["a", "\x1b", "a"]
    assert views[0].detail == (
        "token 0 · id 7 · logprob 0.000 (probability 1) · policy version 1 · trained, advantage +0.500"
    )
    assert views[2].detail == "token 2 · id 9 · no logprob · version unknown · not trained"
    assert [view.index for view in token_views(tokens, Colour.LOGPROB, None, start=2)] == [2]
    zero = [view.level for view in token_views(tokens_of([0.0] * 3, [0.0] * 3), Colour.ADVANTAGE, None)]
    assert zero == ["p0"] * 3
    assert PAGE > 0
    assert decoder("/no/such/folder") is None


def test_ratio_and_entropy_are_those_of_a_step_and_small_drifts_are_plain() -> None:
    nan = float("nan")
    tokens = tokens_of([0.5, -1.0, nan], [0.0, -60.0, nan])

    def levels(colour: Colour, values: list[float]) -> list[str | None]:
        array = np.asarray(values, np.float32)
        return [view.level for view in token_views(tokens, colour, None, values=StepValues(array, array))]

    assert levels(Colour.RATIO, [0.0, -0.019, nan]) == ["p0", "p0", None]
    assert levels(Colour.RATIO, [0.05, -0.2, -0.5]) == ["p1", "n2", "n3"]
    assert levels(Colour.RATIO, [1e4, -1.5, 0.3]) == ["p4", "n4", "p3"]
    assert levels(Colour.ENTROPY, [0.0, 0.5, nan]) == ["s0", "s1", None]
    assert levels(Colour.ENTROPY, [3.6, 9.0, -0.001]) == ["s7", "s7", "s0"]
    assert levels(Colour.LOGPROB, [0.0, 0.0, 0.0]) == ["s0", "s7", None]
    values = StepValues(np.asarray([0.25, 9e4, nan], np.float32), np.asarray([1.5, 0.0, nan], np.float32))
    views = token_views(tokens, Colour.RATIO, None, values=values)
    assert views[0].detail.endswith(
        "trained, advantage +0.500 · ratio 1.284 (log-ratio +0.2500 nats) · entropy 1.500 nats"
    )
    assert views[1].ratio == pytest.approx(np.exp(700.0))
    assert views[2].detail.endswith("not trained")
    assert (views[2].ratio, views[2].entropy) == (None, None)
    assert [level for level, _ in legend_of(tokens, Colour.RATIO)] == [
        "n4", "n3", "n2", "n1", "p0", "p1", "p2", "p3", "p4"
    ]  # fmt: skip
    assert dict(legend_of(tokens, Colour.RATIO))["p0"] == "0.98 to 1.02: as at sampling"
    assert legend_of(tokens, Colour.ENTROPY)[-1] == ("s7", "above 3.5 nats: the policy is uncertain")


def test_two_trajectories_part_at_their_first_difference() -> None:
    same, other = call(0, None, "I add 2 and 2"), call(1, 0, "It is 4")
    pairs = pair_turns([same, other], [same, replace(other, response={"content": "It is 5"}), call(2, 1)])
    assert [pair.is_same for pair in pairs] == [True, False, False]
    assert [pair.parts_here for pair in pairs] == [False, True, False]
    assert (pairs[1].left.same, pairs[1].left.rest) == ("I", " think\nIt is 4")
    assert pairs[1].right.rest == "t is 5"
    assert pairs[2].left is None


def row(
    task: str, number: int, score: float, tokens: int, *, answer: str | None = "4", **opinions: float
) -> ScoredRow:
    return ScoredRow(
        id=f"{task}/{number}", task=task, score=score, generated_tokens=tokens, turns=1, tool_calls=0,
        answer=answer, opinions=opinions, judges=frozenset({"judge"} & opinions.keys()), created_at=now(),
    )  # fmt: skip


def test_a_score_that_grows_with_length_is_found() -> None:
    rows = [row(f"t{task}", n, n / 4, 100 * n + 10 * task) for task in range(10) for n in range(4)]
    found = dependence("generated tokens", rows)
    assert found.correlation == pytest.approx(1.0, abs=0.05)
    assert found.within_groups == pytest.approx(1.0)
    assert sum(item.count for item in found.bins) == len(rows)
    assert found.bins[0].mean_score < found.bins[-1].mean_score
    assert all(dependence(name, []).correlation is None for name in VALUES)
    assert dependence("turns", rows).correlation is None
    assert edges([]) == []
    assert edges(rows)[0].trajectories[0].id == "t0/3"


def test_repeated_answers_and_scorers_that_disagree_are_found() -> None:
    rows = [
        row("a", 0, 1.0, 5, answer="I  cannot", judge=1.0, exact=0.0),
        row("b", 0, 1.0, 6, answer="i cannot", judge=1.0, exact=1.0),
        row("b", 1, 0.0, 7, answer=None),
    ]
    (repeated,) = repeated_answers(rows)
    assert (repeated.answer, repeated.tasks, repeated.mean_score) == ("i cannot", 2, 1.0)
    (pair,) = disagreements(rows)
    assert (pair.one, pair.other, pair.count, pair.disagree) == ("exact", "judge", 2, 1)
    assert pair.with_judge
    assert [each.id for each in pair.apart] == ["a/0"]


@pytest.mark.attack
@pytest.mark.parametrize("name", ["min_score", "max_tokens", "step", "version", "text", "status", "order"])
@pytest.mark.parametrize("value", ["[" * 200_000, "9" * 311, "nan", "1e999", "$where"])
def test_a_hostile_filter_is_refused_or_literal(name: str, value: str) -> None:
    if name == "text" and len(value) < 100:
        assert read_form({name: value}).wanted.text == value
        return
    with pytest.raises(BadQueryError) as caught:
        read_form({name: value})
    assert len(caught.value.detail) < 200


ROOT = Path(__file__).parents[3]


def test_untrusted_text_is_escaped_and_its_hidden_characters_are_shown() -> None:
    shown = str(visible("<script>alert(1)</script>\x1b[31mred\u202eevil\u200b\U000e0041\n\tend"))
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    for escape in (r"\x1b", r"\u202e", r"\u200b", r"\U000e0041"):
        assert f">{escape}</span>" in shown
    assert shown.endswith("\n\tend")


def test_an_emoji_of_several_characters_stays_whole() -> None:
    assert str(visible("👨\u200d👩")) == "👨\u200d👩"


def test_an_excerpt_is_one_line() -> None:
    assert str(excerpt("a\n\n  b", 10)) == "a b"
    assert str(excerpt("x" * 50, 10)) == "x" * 9 + "…"
    assert str(excerpt(None)) == ""


def test_a_sparkline_spans_its_values_and_leaves_gaps_out() -> None:
    shown = str(sparkline([0.0, None, 1.0, math.nan, 0.5]))
    assert 'points="0.0,22.0 48.0,0.0 96.0,11.0"' in shown
    assert "the last 3 steps: 0.000 to 0.500, 0.000 at least, 1.000 at most" in shown
    assert 'points="0.0,11.0 96.0,11.0"' in str(sparkline([0.5, 0.5]))
    assert sparkline([]) == sparkline([None, 0.5]) == ""


def test_ages() -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    assert ">5 min ago<" in str(ago(at - timedelta(minutes=5), at))
    assert str(ago(None)) == MISSING


def test_every_flag_that_a_page_names_exists() -> None:
    pages = (ROOT / "src/agentrl/screens/dashboard/templates").glob("*.html")
    named = {flag for page in pages for flag in re.findall(r"--[a-z_]{3,}", page.read_text(encoding="utf-8"))}
    listed = "".join(
        (ROOT / "docs" / name).read_text(encoding="utf-8")
        for name in ("flags.md", "commands.md", "scoring.md")
    )
    assert len(named) > 3
    assert {flag for flag in named if not re.search(rf"{flag}\b", listed)} == set()


def test_every_attribute_that_a_page_reads_exists() -> None:
    pages = Path(render.__file__).parent
    environment = render.templates()
    sources = [environment.loader.get_source(environment, name)[0] for name in environment.list_templates()]
    read = {node.attr for text in sources for node in environment.parse(text).find_all(nodes.Getattr)}
    rooms = (pages.parent, *(pages.parents[1] / room for room in ("documents", "lab", "observe", "store")))
    code = "\n".join(file.read_text("utf-8") for room in rooms for file in room.rglob("*.py"))
    defined = set(re.findall(r"""def (\w+)|(\w+)(?=: |=| = )|["'](\w+)["']""", code))
    assert len(read) > 200
    assert read - {name for names in defined for name in names} == {"index0", "isoformat", "strftime"}


def _step(number: int, *, attempt: int = 1, inherited: bool = False, **metrics: float) -> StepRow:
    return StepRow(
        id=f"{attempt}/{number}", step=number, status=StepStatus.COMMITTED, policy_version=number - 1,
        owner="t", inherited=inherited, trajectories=0, groups=0,
        planned_at=datetime(2026, 1, 1, tzinfo=UTC), metrics=metrics,
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


def test_a_histogram_has_no_bar_too_thin_to_see() -> None:
    apart, close = [0, 0.25, 0.25, 1], [0.1 + 0.2, 0.3, 1]
    assert histogram("a", "t", "score", apart).rows == [["0", "1"], ["0.250", "2"], ["1", "1"]]
    ((series,), (alone,)) = (histogram("a", "t", "score", each).series for each in (close, [2, 2]))
    assert (len(series.x), sum(series.y), series.y[0], series.y[-1]) == (24, 3, 2, 1)
    assert (alone.x, alone.y) == ([2], [2])


def test_lines_that_coincide_differ_in_their_dashes() -> None:
    (chart,) = overlaid({name: [_step(1, entropy=0.5)] for name in "abc"})
    dashes = [series["dash"] for series in json.loads(chart.json())["series"]]
    assert len({str(dash) for dash in dashes}) == 3


def _start(attempt: int, **flags: object) -> RunSettings:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return RunSettings(id=flags_key("train", attempt), values=flags, by="t", at=at)


def test_a_mark_says_which_flag_changed_between_two_steps() -> None:
    """A step has the flags of the last start up to its own trainer; what steps do not show is no mark."""
    starts = [
        _start(0, learning_rate=1e-3, max_steps=8, log_level="INFO"),
        _start(3, learning_rate=1e-3, max_steps=8, log_level="DEBUG"),
        _start(4, learning_rate=5e-4, max_steps=5, log_level="DEBUG"),
        _start(6, learning_rate=1.0, max_steps=5, log_level="DEBUG"),
    ]
    assert [(item.role, item.attempt) for item in starts] == [("train", at) for at in (0, 3, 4, 6)]
    steps = [_step(number, attempt=attempt) for number, attempt in ((1, 1), (2, 2), (3, 3), (4, 5), (5, 5))]
    marks = flag_changes(steps, starts)
    assert marks == [(4, "--learning_rate 0.001 → 0.0005, --max_steps 8 → 5")]
    (chart,) = curves("r", [replace(step, metrics={"reward": 1.0}) for step in steps], 0.0, marks)
    assert json.loads(chart.json())["marks"] == [list(mark) for mark in marks]
    parents = [_step(1, attempt=9, inherited=True), _step(2), _step(3, attempt=3)]
    assert flag_changes(parents, starts) == []
    assert flag_changes(steps, []) == []


def test_only_curves_with_values_are_drawn() -> None:
    assert [chart.id for chart in curves("r", [_step(1, reward=0.5)])] == ["reward"]
    both = overlaid({"a": [_step(1, reward=0.5, entropy=1.0)], "b": [_step(1, reward=0.7)]})
    assert [[series.name for series in chart.series] for chart in both] == [["a: reward", "b: reward"], ["a"]]
