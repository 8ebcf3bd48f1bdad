"""Show evaluations, compare and list them: in 80 columns, as JSON, as Markdown and as a plot."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.load import Configs
from agentrl.config.schema import AgentConfig, RunConfig
from agentrl.documents.run import Evaluation
from agentrl.errors import AgentRLError, ConfigError
from agentrl.observe.plotting import COLORS, finish, label_steps, new_figure, save_figure
from agentrl.observe.terminal import MISSING, clean, excerpt, fixed, print_json
from agentrl.scoring.evaluation import (
    Comparison,
    Difference,
    EvaluatedTask,
    Prices,
    compare_tasks,
    count_failures,
    summarize,
    summarize_groups,
)
from agentrl.store.client import open_existing

if TYPE_CHECKING:
    from agentrl.store.client import Store


COLUMNS = 80
_NAME = 24
Json = dict[str, Any]


async def evaluated_tasks(store: Store, configs: Configs, evaluation: Evaluation) -> list[EvaluatedTask]:
    """Return the scores and the usage of every task of an evaluation."""
    agent = str(evaluation.settings.get("agent_name") or configs[AgentConfig].agent_name)
    return await store.evaluations.tasks(evaluation.id, agent, evaluation.right_threshold)


def results_of(tasks: Sequence[EvaluatedTask], prices: Prices) -> Json:
    """Return the results of an evaluation as they are stored."""
    groups = summarize_groups(tasks, prices)
    return {
        "total": summarize(tasks, prices).to_json(),
        "groups": {
            kind: [{"name": name, **summary.to_json()} for name, summary in members.items()]
            for kind, members in groups.items()
        },
        "failures": count_failures(tasks),
    }


def render(evaluation: Evaluation) -> str:
    """Return the results as text of at most 80 columns."""
    results = evaluation.results or {}
    total: Json = results.get("total") or {}
    lines = [
        _line("policy", _policy(evaluation)),
        _line("tasks", f"{total.get('tasks', 0)} of {evaluation.file}"),
        _line("evaluation", evaluation.id),
        _line(
            "sampled",
            f"{evaluation.samples} a task: {total.get('scored', 0)} scored, {total.get('failed', 0)} failed",
        ),
        _line(f"score avg@{evaluation.samples}", _interval(total.get("score"))),
    ]
    lines += [_line(f"pass@{k}", _interval(value)) for k, value in (total.get("pass_at") or {}).items()]
    lines += [_line(name, text) for name, text in _usage(total)]
    failures = results.get("failures") or {}
    if failures:
        lines.append(_line("failures", ", ".join(f"{kind}: {count}" for kind, count in failures.items())))
    lines.append("Brackets hold 95 % intervals: bootstrap over tasks.")
    for kind, members in (results.get("groups") or {}).items():
        lines += ["", *_group_table(kind, members)]
    return "\n".join(lines)


def markdown(evaluations: Sequence[Evaluation]) -> str:
    """Return a Markdown table with a row for each finished evaluation, in the given order."""
    columns = [
        "policy",
        "step",
        "tasks",
        "samples",
        "score",
        "pass@1",
        "best pass@k",
        "turns",
        "tokens",
        "cost",
    ]
    rows = [columns, ["---"] * 2 + ["---:"] * (len(columns) - 2)]
    rows += [_markdown_row(evaluation) for evaluation in evaluations]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def table(evaluations: Sequence[Evaluation], best: Mapping[tuple[str, str], int]) -> str:
    """Return the evaluations as lines of at most 80 columns; ``*`` marks the best version of its tasks."""
    lines = [f"{'evaluation':<38}{'step':>6}{'status':>10}{'score':>8}{'pass@1':>8}{'tokens':>9}"]
    for item in evaluations:
        total: Json = item.total
        is_best = item.version is not None and (
            best.get((item.tasks_digest, item.settings_digest)) == item.version
        )
        name = excerpt(item.id, 36) + (" *" if is_best else "")
        step = MISSING if item.step is None else str(item.step)
        tokens = _short(total.get("generated_tokens"))
        lines.append(
            f"{name:<38}{step:>6}{item.status:>10}{_value(total.get('score')):>8}"
            f"{_value((total.get('pass_at') or {}).get('1')):>8}{tokens:>9}"
        )
    if any("*" in line for line in lines):
        lines.append("* the best version of its tasks: its weights are kept")
    return "\n".join(lines)


def render_comparison(a: Evaluation, b: Evaluation, comparison: Comparison) -> str:
    """Return a comparison as text of at most 80 columns."""
    lines = [
        _line("A", f"{a.id}: {_policy(a)}"),
        _line("B", f"{b.id}: {_policy(b)}"),
        _line(
            "tasks",
            f"{comparison.tasks} in both; {comparison.only_a} only in A, {comparison.only_b} only in B",
        ),
        "",
        f"{'':<8}{'A':>8}{'B':>8}{'B - A':>9}  {'95 % interval':<17}{'p':>8}{'B>A':>6}{'B<A':>6}"
        f"{'p sign':>8}",
        _difference("score", comparison.score),
        _difference("pass", comparison.passed),
        "",
        "interval: paired bootstrap over tasks; p: sign-flip permutation test;",
        "p sign: exact sign test (McNemar's for one trajectory a task)",
    ]
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    return f"{name:<13}{excerpt(text, COLUMNS - 13)}"


def _policy(evaluation: Evaluation) -> str:
    if evaluation.version is None:
        return f"model {evaluation.model}"
    step = "" if evaluation.step is None else f" (step {evaluation.step})"
    return f"version {evaluation.version}{step}"


def _usage(total: Json) -> list[tuple[str, str]]:
    """Return rows of turns, tokens, seconds and cost; tokens and cost are of all trajectories."""
    rows = []
    if total.get("turns") is not None:
        rows.append(("turns", f"{total['turns']:.2f} a trajectory"))
    if total.get("seconds") is not None:
        rows.append(("seconds", f"{total['seconds']:.2f} a trajectory"))
    if "input_tokens" in total:
        text = f"{total['input_tokens']:,} prompt ({total['cached_tokens']:,} cached)"
        rows.append(("tokens", f"{text}, {total['generated_tokens']:,} generated"))
    if total.get("cost") is not None:
        rows.append(("cost", f"{total['cost']:.4g}"))
    return rows


def _group_table(kind: str, members: Sequence[Json]) -> list[str]:
    head = f"{kind:<{_NAME}}{'tasks':>7}{'failed':>8}{'score':>8}{'pass@1':>8}{'turns':>7}{'tokens':>10}"
    lines = [head]
    for member in members:
        name = excerpt(member["name"], _NAME - 1)
        turns = MISSING if member["turns"] is None else f"{member['turns']:.1f}"
        lines.append(
            f"{name:<{_NAME}}{member['tasks']:>7}{member['failed']:>8}{_value(member['score']):>8}"
            f"{_value(member['pass_at'].get('1')):>8}{turns:>7}{_short(member['generated_tokens']):>10}"
        )
    return lines


def _markdown_row(evaluation: Evaluation) -> list[str]:
    total: Json = evaluation.total
    pass_at: Json = total.get("pass_at") or {}
    largest = max(pass_at, key=int, default=None)
    best = MISSING if largest is None else f"{_interval(pass_at[largest])} (k = {largest})"
    cells = [
        f"version {evaluation.version}" if evaluation.version is not None else str(evaluation.model),
        MISSING if evaluation.step is None else evaluation.step,
        total.get("tasks", 0), evaluation.samples, _interval(total.get("score")), _interval(pass_at.get("1")),
        best, fixed(total.get("turns"), 2), f"{total.get('generated_tokens', 0):,}",
        MISSING if total.get("cost") is None else f"{total['cost']:.4g}",
    ]  # fmt: skip
    return [clean(cell).replace("|", "\\|") for cell in cells]


def _difference(name: str, difference: Difference) -> str:
    interval = f"[{difference.effect.low:+.3f}, {difference.effect.high:+.3f}]"
    return (
        f"{name:<8}{difference.a:>8.3f}{difference.b:>8.3f}{difference.effect.value:>+9.3f}  {interval:<17}"
        f"{difference.p_permutation:>8.4f}{difference.better:>6}{difference.worse:>6}{difference.p_sign:>8.4f}"
    )


def _interval(estimate: Mapping[str, float] | None) -> str:
    if estimate is None:
        return MISSING
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _value(estimate: Mapping[str, float] | None) -> str:
    return MISSING if estimate is None else f"{estimate['value']:.3f}"


def _short(count: int | None) -> str:
    if count is None:
        return MISSING
    return f"{count:,}" if count < 1_000_000 else f"{count / 1e6:.1f}M"


_SHOWN = 10


async def compare(configs: Configs, a: str, b: str, *, as_json: bool) -> None:
    """Print the paired comparison of two evaluations, named by id, version or RUN/id."""
    first, second = await _read(configs, a), await _read(configs, b)
    comparison = await asyncio.to_thread(compare_tasks, first[1], second[1])
    if comparison is None:
        raise ConfigError(
            f"{first[0].id} and {second[0].id} have no scored task with the same id and content in common",
            hint="evaluate both policies on the same --eval_file",
        )
    a_id, b_id = first[0].id, second[0].id
    if as_json:
        named = {"score": comparison.score, "pass": comparison.passed}
        counts = {"tasks": comparison.tasks, "only_a": comparison.only_a, "only_b": comparison.only_b}
        print_json({"a": a_id, "b": b_id, **counts, **named})
    else:
        print(render_comparison(first[0], second[0], comparison))


async def report(configs: Configs, *, as_json: bool, as_markdown: bool, plot: str | None) -> None:
    """Print the evaluations of a run as a table, as Markdown or as JSON; plot them if ``plot`` is a file."""
    async with await open_existing(configs[RunConfig]) as store:
        evaluations = await store.evaluations.all()
        best = await store.evaluations.best_versions()
    if as_json:
        print_json([item.to_document() for item in evaluations])
    elif as_markdown:
        print(markdown([item for item in evaluations if item.results is not None]))
    else:
        print(table(evaluations, best))
    if plot is not None:
        plot_evaluations(configs[RunConfig].run_name, evaluations, Path(plot))


async def _read(configs: Configs, named: str) -> tuple[Evaluation, list[EvaluatedTask]]:
    run_name, slash, rest = named.rpartition("/")
    run = configs[RunConfig]
    if slash:
        run = dataclasses.replace(run, run_name=run_name)
    async with await open_existing(run) as store:
        evaluation = await find(store, rest)
        return evaluation, await evaluated_tasks(store, configs, evaluation)


async def find(store: Store, named: str) -> Evaluation:
    """Return the finished evaluation that ``named`` is the id, a part of the id or the version of.

    Raises ConfigError if there is none or more than one.
    """
    finished = [item for item in await store.evaluations.all() if item.results is not None]
    number = named.removeprefix("v")
    chosen = [item for item in finished if item.id == named]
    if not chosen and number.isdigit():
        chosen = [item for item in finished if item.version == int(number)]
    chosen = chosen or [item for item in finished if named in item.id]
    if len(chosen) == 1:
        return chosen[0]
    what = "several finished evaluations" if chosen else "no finished evaluation"
    shown = ", ".join(item.id for item in (chosen or finished)[-_SHOWN:])
    raise ConfigError(
        f"run {store.run_name!r} has {what} named {named!r}",
        hint=f"give one of: {shown}" if shown else "`agentrl eval` makes one",
    )


def plot_evaluations(run_name: str, evaluations: Sequence[Evaluation], out: Path) -> None:
    """Draw score and pass@1 over steps into ``out``, whose suffix names the format (.png, .svg, .pdf).

    Each set of tasks and settings has a colour of its own. Raises AgentRLError without a finished
    evaluation of a version, ConfigError when ``out`` cannot be written.
    """
    lines: dict[tuple[str, str], list[Evaluation]] = defaultdict(list)
    for item in evaluations:
        if item.step is not None and item.total.get("score"):
            lines[item.tasks_digest, item.settings_digest].append(item)
    if not lines:
        raise AgentRLError(
            f"run {run_name!r} has no finished evaluation of a policy version to plot",
            hint="`agentrl eval --eval_steps N` evaluates the versions of a run",
        )
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    for index, members in enumerate(lines.values()):
        color = COLORS[index % len(COLORS)]
        members.sort(key=lambda item: item.step or 0)
        name = clean(Path(members[0].file).name)
        _draw(axes, members, ("score",), color, "-", f"score, {name}")
        _draw(axes, members, ("pass_at", "1"), color, "--", f"pass@1, {name}")
    axes.set_title(f"{run_name}: evaluations, 95 % intervals over tasks", loc="left", fontsize=11)
    label_steps(axes)
    finish(axes)
    save_figure(figure, out, "--plot")


def _draw(
    axes: Any, members: Sequence[Evaluation], path: Sequence[str], color: str, style: str, label: str
) -> None:
    points = []
    for item in members:
        value: Any = item.total
        for key in path:
            value = value.get(key) if value else None
        if value:
            points.append((item.step, value["value"], value["low"], value["high"]))
    x, y, low, high = (list(column) for column in zip(*points, strict=True)) if points else ([], [], [], [])
    axes.plot(x, y, style, color=color, marker="o", markersize=4, linewidth=1.8, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
