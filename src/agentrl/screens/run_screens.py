"""Show a run on one screen of 80 columns or as tables, also as JSON, and the runs of a server as a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.documents.run import Evaluation
from agentrl.documents.status import SHOWN_STATUSES, DataStatus, ServiceStatus, TaskStatus
from agentrl.observe.progress import metric_text
from agentrl.observe.terminal import MISSING, age, duration, excerpt, fixed, table, table_of, to_json
from agentrl.screens.snapshot import RunSnapshot, findings, gold_means, state
from agentrl.screens.views.counts import Continued, RunDetails
from agentrl.screens.views.pipelines import StepRow
from agentrl.store.costs import RunCosts
from agentrl.store.mixture import SourceState
from agentrl.store.run_list import Activity, RunSummary

LAST_STEPS = 40
"""Steps of the line of rewards, and of the JSON."""
_ACTIVITY_STYLES: dict[Activity, str] = {
    "training": "bold green",
    "sampling": "bold cyan",
    "finished": "green",
    "serving": "yellow",
    "idle": "dim",
}
_SEVERITY_STYLES = {"bad": "bold red", "warn": "yellow", "good": "bold green", "": "dim"}
_BARS = "▁▂▃▄▅▆▇█"
_LABEL_WIDTH = 10
_NAMES_SHOWN = 6
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render_run_status(run: RunSnapshot, *, output_free: int | None = None) -> RenderableType:
    """Return the screen; ``output_free`` is the free space of this machine's output folder, in bytes."""
    word, severity = state(run)
    title = Text(run.run_name, style="bold")
    title.append(f"  {word}", style=_SEVERITY_STYLES[severity])
    title.append(f"  {run.at:%Y-%m-%d %H:%M:%S} UTC", style="dim")
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_LABEL_WIDTH, style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _lines(run, output_free):
        grid.add_row(label, text)
    return Group(title, grid)


def _lines(run: RunSnapshot, output_free: int | None) -> Iterator[tuple[str, Text]]:
    yield from _finding_lines(run)
    if run.parent is not None:
        yield "parent", Text(run.parent.shown)
    if run.children:
        yield "children", Text("; ".join(child.shown for child in run.children[:_NAMES_SHOWN]))
    yield from _step_lines(run)
    yield "rate", _rate(run)
    yield "queues", _queues(run)
    for source in run.sources:
        yield "source", _source(source)
    yield "trainer", _trainer(run)
    yield "samplers", _samplers(run)
    yield from _engines(run)
    yield from _weights(run)
    for failure in run.failures[:_NAMES_SHOWN]:
        text = Text(f"{failure.kind} {failure.count:,}", style="yellow")
        yield "failed", text.append(f"  {excerpt(failure.message, 100)}", style="dim")
    if run.continued.any:
        yield "continued", Text(continued_text(run.continued))
    if run.costs.shares():
        yield "took", _took(run.costs)
    yield "disk", _disk(run, output_free)


def _finding_lines(run: RunSnapshot) -> Iterator[tuple[str, Text]]:
    wrong = findings(run)
    for finding in wrong:
        label = "wrong" if finding.severity == "bad" else "look at"
        text = Text(excerpt(finding.what, 400), style=_SEVERITY_STYLES[finding.severity])
        yield label, text.append(f"\n→ {finding.hint}", style="dim")
    if not wrong and run.steps and not run.finished:
        yield "healthy", Text("nothing is down, no metric is out of its usual range", style="green")


def _step_lines(run: RunSnapshot) -> Iterator[tuple[str, Text]]:
    if not run.steps:
        yield "step", Text("no optimizer step yet")
        return
    last = run.steps[-1]
    metrics = last.metrics
    text = Text(f"{last.step}", style="bold")
    text.append(f"  {age(last.committed_at or last.planned_at, run.at)}")
    text.append(f"  {_steps_per_hour(run.steps)} steps/h")
    text.append(f"  {metric_text(metrics, 'tokens_per_second', ',.0f')} tok/s trained", style="dim")
    yield "step", text
    text = Text(fixed(last.reward), style="bold green")
    text.append(f"  {sparkline([step.reward for step in run.steps[-LAST_STEPS:]])}", style="green")
    text.append(f"  pass rate {fixed(last.pass_rate, 2)}  KL(μ‖π) {metric_text(metrics, 'kl_k3', '.1e')}")
    yield "reward", text
    stale = f"mean {fixed(last.staleness_mean, 2)}, max {fixed(last.staleness_max, 0)} steps"
    yield "staleness", Text(stale)


def _rate(run: RunSnapshot) -> Text:
    rates = run.rates
    text = Text(f"{rates.per_minute:.1f} scored trajectories/min")
    text.append(f", mean score {fixed(rates.mean_score)}, {rates.failed} failed")
    text.append(f", {rates.generated_tokens / rates.seconds:,.0f} tok/s generated")
    return text.append(f" (last {rates.seconds / 60:.0f} min)", style="dim")


def _queues(run: RunSnapshot) -> Text:
    return Text(
        "groups: {tasks_created} to come, {tasks_running} open, {tasks_waiting} to finalize,"
        " {tasks_completed} done; trajectories: {waiting_for_score} to score, {data_ready} ready,"
        " {data_planned} planned, {data_trained} trained".format(**run.queues)
    )


def _source(source: SourceState) -> Text:
    text = Text(excerpt(source.name, 40), style="" if source.is_open else "dim")
    text.append(f"  weight {source.weight:g}, {source.begun:,} groups begun, {source.share:.0%} of all")
    text.append(f" (its share is now {source.target:.0%})" if source.is_open else "")
    text.append(f"; pass rate {fixed(source.pass_rate, 2)}; epoch {source.epoch} of {source.tasks:,} tasks")
    if source.set_aside:
        aside = ", ".join(f"{count:,} {pool}" for pool, count in sorted(source.set_aside.items()))
        text.append(f" without {aside}")
    return text.append(f"\n{source.why}", style="dim") if source.why else text


def _trainer(run: RunSnapshot) -> Text:
    lease = run.lease
    if lease.owner is None:
        return Text("none" if lease.ended is None else str(lease.ended), style="dim")
    name = excerpt(lease.owner, 60) + (f", {lease.doing.shown}" if lease.doing and run.trainer_alive else "")
    return Text(name) if run.trainer_alive else Text(f"{name}, ended or silent", style="yellow")


def _samplers(run: RunSnapshot) -> Text:
    live = run.liveness
    if not live.samplers:
        return Text(f"none is alive; the last trajectory began {age(live.last_claim, run.at)}")
    names = [f"{excerpt(name, 40)} ({live.held(name)}, {what})" for name, what in live.samplers.items()]
    more = f", {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    others = f"; {live.ending}" if live.ending else ""
    total = sum(live.claims.values())
    return Text(f"{len(names)} with {total} claims: {', '.join(names[:_NAMES_SHOWN])}{more}{others}")


def _engines(run: RunSnapshot) -> Iterator[tuple[str, Text]]:
    engines = [engine for engine in run.engines if engine.status is not ServiceStatus.STOPPED]
    if not engines:
        yield "engines", Text("none", style="dim")
    for engine in engines[:_NAMES_SHOWN]:
        alive = run.is_alive(engine)
        text = Text(f"{excerpt(engine.url, 40)} {engine.engine} ")
        text.append(str(engine.status) if alive else "dead", style="green" if alive else "red")
        version = MISSING if engine.policy_version is None else str(engine.policy_version)
        text.append(f" version {version}, {engine.running_requests} running")
        text.append(f", heard {age(engine.heartbeat, run.at)}", style="dim")
        if engine.detail:
            text.append(f"  {excerpt(engine.detail, 60)}", style="yellow")
        yield "engine", text
    rest = Counter("live" if run.is_alive(engine) else "dead" for engine in engines[_NAMES_SHOWN:])
    if rest:
        yield "engines", Text("more: " + ", ".join(f"{count} {what}" for what, count in rest.items()))


def _weights(run: RunSnapshot) -> Iterator[tuple[str, Text]]:
    if not run.versions:
        return
    newest = run.versions[0]
    text = Text(f"version {newest.version} {newest.encoding}, ")
    text.append(amount(newest.bytes) if newest.bytes else "in the trainer's memory")
    if newest.seconds_waited is not None:
        text.append(f", trainer waited {newest.seconds_waited:.1f} s")
    if newest.seconds_until_served is not None:
        text.append(f", served by {newest.engines} after {newest.seconds_until_served:.1f} s")
    yield "weights", text


def continued_text(continued: Continued) -> str:
    """Return what did not have to be done again, and what had to be."""
    parts = [
        f"{continued.trajectories:,} trajectories in another process ({continued.died:,} owners died,"
        f" {continued.released:,} released them)",
        f"{continued.turns:,} turns, {continued.tokens:,} tokens and {duration(continued.tool_seconds)} of"
        " tools not repeated",
    ]
    if continued.diverged:
        parts.append(f"{continued.diverged:,} diverged, {continued.dropped:,} turns dropped")
    if continued.restarted:
        parts.append(f"{continued.restarted:,} begun anew")
    if continued.poison:
        parts.append(f"{continued.poison:,} poison")
    return "; ".join(parts)


def _disk(run: RunSnapshot, output_free: int | None) -> Text:
    disk = run.disk
    parts = []
    if disk.run is not None:
        parts.append(f"database {amount(disk.run)}")
    if disk.free is not None:
        parts.append(f"{amount(disk.free)} free on the server")
    if output_free is not None:
        parts.append(f"{amount(output_free)} free for checkpoints here")
    return Text(", ".join(parts) or MISSING)


def _took(costs: RunCosts) -> Text:
    text = Text()
    for share in costs.shares():
        text.append("; " if text else "").append(share.named)
        if share.total is not None:
            text.append(f" {money(share.total)}", style="bold")
        text.append(f" GPUs {duration(share.gpu_seconds)}", style="dim")
        if share.of == "run":
            text.append(
                f", tools {duration(share.tool_seconds)}, judges {duration(share.judge_seconds)},",
                style="dim",
            )
            text.append(f" {share.tokens:,.0f} tokens", style="dim")
    return text


def money(amount: float) -> str:
    """Return an amount of money with four digits, or with its cents."""
    return f"{amount:,.2f}" if amount >= 10 else f"{amount:.4g}"


def _steps_per_hour(steps: Sequence[StepRow]) -> str:
    times = [step.committed_at for step in steps[-11:] if step.committed_at is not None]
    if len(times) < 2 or (seconds := (times[-1] - times[0]).total_seconds()) <= 0:
        return MISSING
    return f"{3600 * (len(times) - 1) / seconds:,.0f}"


def sparkline(values: Sequence[float | None]) -> str:
    """Return a bar per value between the lowest and the highest; a space for a missing one."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    width = (high - low) or 1.0
    return "".join(
        " " if value is None or not math.isfinite(value)
        else _BARS[int((len(_BARS) - 1) * (value - low) / width)]
        for value in values
    )  # fmt: skip


def amount(size: float) -> str:
    """Return a number of bytes as text, such as ``1.2 GiB``."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def status_json(run: RunSnapshot, *, output_free: int | None) -> dict[str, Any]:
    """Return the value of ``agentrl status``; docs/commands.md lists its keys."""
    lease, engines = run.lease, [item for item in run.engines if item.status is not ServiceStatus.STOPPED]
    trainer = {
        "owner": lease.owner, "host": lease.host, "pid": lease.pid, "alive": run.trainer_alive,
        "doing": None if lease.doing is None else lease.doing.shown,
    }  # fmt: skip
    return {
        **common_json(run),
        "activity": run.activity,
        "steps": to_json(run.steps[-LAST_STEPS:]),
        "rates": to_json(run.rates),
        "queues": run.queues,
        "sources": to_json(run.sources),
        "trainer": None if lease.owner is None else trainer,
        "ended": to_json(lease.ended),
        "last_claim": to_json(run.liveness.last_claim),
        "engines": [{**to_json(engine), "alive": run.is_alive(engine)} for engine in engines],
        "versions": to_json(run.versions),
        "disk": to_json(run.disk),
        "output_free": output_free,
    }


def common_json(run: RunSnapshot) -> dict[str, Any]:
    """Return the keys that the JSON of ``agentrl status`` and of ``agentrl audit run`` have in common."""
    return {
        "run_name": run.run_name,
        "at": to_json(run.at),
        "state": state(run)[0],
        "findings": to_json(findings(run)),
        "parent": to_json(run.parent),
        "children": to_json(run.children),
        "samplers": to_json(run.liveness.claims),
        "sampler_states": to_json(run.liveness.sampler_states),
        "sampler_work": run.liveness.samplers,
        "outages": to_json(run.liveness.outages),
        "failures": to_json(run.failures),
        "continued": to_json(run.continued),
        "costs": {**to_json(run.costs), "shares": to_json(run.costs.shares())},
    }


def render_runs(host: str, runs: Sequence[RunSummary]) -> RenderableType:
    """Return a row per run of the server ``host``, as the caller ordered them."""
    if not runs:
        return _no_run(host)
    return table_of(
        f"runs on MongoDB at {host}: {len(runs)}", runs,
        ("run", lambda row: row.name),
        ("state", lambda row: _problem(row) or Text(row.activity, style=_ACTIVITY_STYLES[row.activity])),
        ("step", lambda row: row.steps or MISSING),
        ("reward", lambda row: fixed(row.reward)),
        ("pass", lambda row: fixed(row.pass_rate, 2)),
        ("records", lambda row: f"{row.trajectories:,}"),
        ("samplers", lambda row: row.samplers),
        ("engines", lambda row: row.engines),
        ("last", lambda row: age(row.active_at, row.at)),
        text=2,
    )  # fmt: skip


def render_run_list(host: str, runs: Sequence[RunSummary]) -> RenderableType:
    """Return a row per run with its model, size, tags and note, for managing the runs of ``host``."""
    if not runs:
        return _no_run(host)
    return table_of(
        f"runs on MongoDB at {host}: {len(runs)}", runs,
        ("run", lambda row: row.name),
        ("state", lambda row: _problem(row) or ("live" if row.alive else "ended")),
        ("model", lambda row: MISSING if row.model is None else excerpt(row.model, 40)),
        ("tasks", lambda row: f"{row.tasks:,}"),
        ("step", lambda row: row.steps or MISSING),
        ("size", lambda row: MISSING if row.bytes is None else amount(row.bytes)),
        ("last", lambda row: age(row.active_at, row.at)),
        ("tags", lambda row: " ".join(row.tags)),
        ("note", lambda row: excerpt(row.note or "", 60)),
        ("parent", lambda row: "" if row.parent is None else row.parent.shown),
        text=3,
    )  # fmt: skip


def _no_run(host: str) -> Text:
    return Text(f"no run on MongoDB at {host}\n  → agentrl tasks load FILE.jsonl --run_name NAME")


def _problem(run: RunSummary) -> Text | None:
    return None if run.problem is None else Text(excerpt(run.problem, 60), style="yellow")


LAST_EVALUATIONS = 5
_STYLES = {"bad": "red", "warn": "yellow"}
_STEP_METRICS = {
    "reward": ("reward", ".3f"),
    "pass": ("pass_rate", ".2f"),
    "abandoned": ("abandoned_fraction", ".2f"),
    "loss": ("loss", "+.2e"),
    "KL(μ‖π)": ("kl_k3", ".1e"),
    "stale": ("staleness_mean", ".2f"),
    "trajectories": ("trajectories", ".0f"),
    "trained tokens": ("trainable_tokens", ",.0f"),
    "tok/s": ("tokens_per_second", ",.0f"),
}


def render_tables(run: RunSnapshot, details: RunDetails) -> RenderableType:
    """Return the tables that have rows."""
    title = Text(f"run {run.run_name}, {run.at:%Y-%m-%d %H:%M:%S} UTC", style="bold")
    if run.liveness.waiting_for_score:
        waiting = f"\n{run.liveness.waiting_for_score} sampled trajectories wait for a score"
        title.append(waiting, style="yellow")
    tables = chain(
        _wrong(run), _configuration(run), _sampling(run, details), _data(details), _judges(run),
        _costs(run), _processes(run), _training(run, details),
    )  # fmt: skip
    return Group(title, *(built for built in tables if built.row_count))


def _wrong(run: RunSnapshot) -> Iterator[Table]:
    """Yield what is wrong, and what samplers find or found down: they claim nothing that needs row."""
    yield table_of(
        "What is wrong", findings(run),
        ("what", lambda row: Text(excerpt(row.what, 400), style=_STYLES[row.severity])),
        ("what to do", lambda row: row.hint),
        text=2,
    )  # fmt: skip
    yield table_of(
        "Down now", run.liveness.outages,
        ("what", lambda row: Text(row.dependency, style="red")),
        ("since", lambda row: age(row.began_at, run.at)),
        ("calls held", lambda row: row.held),
        ("last error", lambda row: excerpt(row.why, 120)),
        ("seen by", lambda row: excerpt(row.by, 60)),
        text=3,
    )  # fmt: skip
    yield table_of(
        "Was down", run.past_outages,
        ("what", lambda row: row.dependency),
        ("since (UTC)", lambda row: f"{row.began_at:%H:%M:%S}"),
        ("until", lambda row: f"{row.ended_at:%H:%M:%S}"),
        ("ended", lambda row: age(row.ended_at, run.at)),
        ("last error", lambda row: excerpt(row.why, 120)),
        ("seen by", lambda row: excerpt(row.by, 60)),
        text=4,
    )  # fmt: skip


def _configuration(run: RunSnapshot) -> Iterator[Table]:
    """Yield the settings, and the flags that each role was given; the database has the others too."""
    yield table_of(
        "Begun with", run.settings,
        ("concern", lambda row: row.id),
        ("settings", lambda row: excerpt(_named(row.values.items()), 400)),
        ("by", lambda row: excerpt(row.by, 60)),
        ("when", lambda row: age(row.at, run.at)),
        text=3,
    )  # fmt: skip
    yield table_of(
        "Configuration", run.configurations,
        ("role", lambda row: row.role),
        ("flags given", lambda row: excerpt(_named(row.given_values), 400)),
        ("packages", lambda row: excerpt(_named((row.packages or {}).items()), 200)),
        ("by", lambda row: excerpt(row.by, 60)),
        ("when", lambda row: age(row.at, run.at)),
        text=4,
    )  # fmt: skip


def _named(values: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values)


def _sampling(run: RunSnapshot, details: RunDetails) -> Iterator[Table]:
    tasks = {f"{split}, epoch {epoch}": counts for (split, epoch), counts in run.tasks.items()}
    yield _statuses("Tasks", tasks, [str(status) for status in TaskStatus])
    yield _statuses("Records", run.records, SHOWN_STATUSES)
    yield table_of(
        "Failed attempts", run.failures,
        ("kind", lambda row: row.kind),
        ("count", lambda row: row.count),
        ("newest message", lambda row: excerpt(row.message, 90)),
    )  # fmt: skip
    yield table_of(
        "Trajectories that went on in another process", [run.continued] if run.continued.any else [],
        ("trajectories", lambda row: row.trajectories),
        ("owners died", lambda row: row.died),
        ("released", lambda row: row.released),
        ("turns saved", lambda row: row.turns),
        ("tokens saved", lambda row: f"{row.tokens:,}"),
        ("tools saved", lambda row: duration(row.tool_seconds)),
        ("diverged", lambda row: row.diverged),
        ("turns dropped", lambda row: row.dropped),
        ("begun anew", lambda row: row.restarted),
        ("poison", lambda row: row.poison),
    )  # fmt: skip
    yield table_of(
        "Training groups", details.groups,
        ("begun by", lambda row: row.by),
        ("groups", lambda row: row.groups),
        ("abandoned", lambda row: row.abandoned_groups),
        ("share", lambda row: _share(row.abandoned_groups, row.groups)),
        ("trajectories", lambda row: row.trajectories),
        ("abandoned", lambda row: row.trajectories - row.trained),
        ("share", lambda row: _share(row.trajectories - row.trained, row.trajectories)),
        ("pass rate", lambda row: fixed(row.pass_rate, 2)),
    )  # fmt: skip
    yield table_of(
        "Environments", details.environments,
        ("split", lambda row: excerpt(row.split, 40)),
        ("environment", lambda row: excerpt(row.environment, 40)),
        ("tasks", lambda row: row.tasks),
        ("finalized", lambda row: row.finalized),
        ("scored", lambda row: row.trajectories),
        ("mean score", lambda row: fixed(row.score)),
        ("pass rate", lambda row: fixed(row.pass_rate, 2)),
        text=2,
    )  # fmt: skip
    yield table_of(
        "Evaluations, newest first (agentrl eval report lists all)",
        run.evaluations[: -LAST_EVALUATIONS - 1 : -1],
        ("evaluation", lambda row: excerpt(row.id, 40)),
        ("policy", _policy),
        ("step", lambda row: MISSING if row.step is None else row.step),
        ("status", run.state_of),
        ("tasks of", lambda row: excerpt(row.file, 40)),
        ("samples", lambda row: row.samples),
        ("scored", lambda row: row.total.get("scored", MISSING)),
        ("failed", lambda row: row.total.get("failed", MISSING)),
        ("score", lambda row: _interval(row.total.get("score"))),
        ("pass@1", lambda row: _interval((row.total.get("pass_at") or {}).get("1"))),
        ("when", lambda row: age(row.finished_at or row.seen_at, run.at)),
        text=5,
    )  # fmt: skip


def _policy(item: Evaluation) -> str:
    return excerpt(item.model or MISSING, 40) if item.version is None else f"version {item.version}"


def _statuses(title: str, counts: Mapping[str, Mapping[str, int]], statuses: Sequence[str]) -> Table:
    rows = [
        [name, *(by_status.get(status, 0) or MISSING for status in statuses), sum(by_status.values())]
        for name, by_status in sorted(counts.items())
    ]
    return table(title, ["split", *statuses, "all"], rows)


def _share(part: int, whole: int) -> str:
    return fixed(part / whole if whole else None, 2)


def _interval(value: Mapping[str, float] | None) -> str:
    """Return a mean with its 95 % interval."""
    if value is None or value.get("value") is None:
        return MISSING
    if value.get("low") is None or value.get("high") is None:
        return fixed(value["value"])
    return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _data(details: RunDetails) -> Iterator[Table]:
    order = [str(status) for status in DataStatus]
    yield table_of(
        "Training data", sorted(details.data, key=lambda row: order.index(row.status)),
        ("status", lambda row: row.status),
        ("trajectories", lambda row: row.count),
        ("tokens", lambda row: f"{row.tokens:,}"),
        ("trainable tokens", lambda row: f"{row.trainable_tokens:,}"),
        ("why", lambda row: excerpt(row.because or "", 120)),
    )  # fmt: skip
    yield table_of(
        "Length bias (generated tokens of scored trajectories)", details.lengths,
        ("split", lambda row: row.split),
        ("sampled", lambda row: row.sampled),
        ("tokens each", lambda row: fixed(row.sampled_tokens, 1)),
        ("trained", lambda row: row.trained),
        ("tokens each", lambda row: fixed(row.trained_tokens, 1)),
        ("trained / sampled", lambda row: fixed(row.ratio, 2)),
    )  # fmt: skip
    yield table_of(
        "Prefix cache (prompts of all model calls)", details.prompts,
        ("split", lambda row: row.split),
        ("tokens", lambda row: f"{row.tokens:,}"),
        ("cached by engines", lambda row: f"{row.cached:,}"),
        ("hit rate", lambda row: fixed(row.cache_hit_rate, 2)),
    )  # fmt: skip


def _costs(run: RunSnapshot) -> Iterator[Table]:
    yield table_of(
        "Costs", run.costs.shares(),
        ("of", lambda row: row.named),
        ("GPUs", lambda row: duration(row.gpu_seconds)),
        ("tools", lambda row: duration(row.tool_seconds)),
        ("judges", lambda row: duration(row.judge_seconds)),
        ("tokens", lambda row: f"{row.tokens:,.0f}"),
        ("judges and other models", lambda row: money(row.api_cost)),
        ("in all", lambda row: MISSING if row.total is None else money(row.total)),
    )  # fmt: skip


def _judges(run: RunSnapshot) -> Iterator[Table]:
    yield table_of(
        "Judges on the gold slice", gold_means(run.judge_checks)[-LAST_EVALUATIONS:],
        ("scorer", lambda row: excerpt(row.scorer, 40)),
        ("judge", lambda row: excerpt(row.models, 40) or MISSING),
        ("step", lambda row: row.step),
        ("mean", lambda row: fixed(row.mean(row.scores))),
        ("people", lambda row: fixed(fmean(row.expected[each] for each in row.scores))),
        ("scored", lambda row: f"{len(row.scores)} of {len(row.expected)}"),
        text=2,
    )  # fmt: skip


def _processes(run: RunSnapshot) -> Iterator[Table]:
    yield table_of(
        "Samplers (split train)", run.liveness.samplers.items(),
        ("sampler", lambda row: excerpt(row[0], 60)),
        ("claims", lambda row: run.liveness.held(row[0])),
        ("what it does", lambda row: row[1]),
    )  # fmt: skip
    dead = Text("dead", style="red")
    yield table_of(
        "Engines", [engine for engine in run.engines if engine.status is not ServiceStatus.STOPPED],
        ("url", lambda row: row.url),
        ("engine", lambda row: row.engine),
        ("status", lambda row: Text(row.status, style="green") if run.is_alive(row) else dead),
        ("version", lambda row: MISSING if row.policy_version is None else row.policy_version),
        ("running", lambda row: row.running_requests),
        ("tokens/s", lambda row: fixed(row.tokens_per_second, 1)),
        ("prompt cached", lambda row: fixed(row.prefix_cache_hit_rate, 2)),
        ("heartbeat", lambda row: age(row.heartbeat, run.at)),
        ("detail", lambda row: excerpt(row.detail or "", 60)),
        text=3,
    )  # fmt: skip


def _training(run: RunSnapshot, details: RunDetails) -> Iterator[Table]:
    yield table_of(
        "Policy versions", details.versions,
        ("version", lambda row: row.id),
        ("step", lambda row: row.step),
        ("status", lambda row: row.status),
        ("published", lambda row: age(row.published_at, run.at)),
        ("location", lambda row: row.location),
        text=0,
    )  # fmt: skip
    rows = [
        [
            step.step,
            step.status,
            step.policy_version,
            *(metric_text(step.metrics, key, form) for key, form in _STEP_METRICS.values()),
            age(step.committed_at or step.planned_at, run.at),
        ]
        for step in details.steps
    ]
    yield table("Last steps", ["step", "status", "from version", *_STEP_METRICS, "when"], rows, text=0)


def tables_json(run: RunSnapshot, details: RunDetails) -> dict[str, Any]:
    """Return the value of ``agentrl audit run``: the rows of its tables."""
    return {
        **common_json(run),
        **to_json(details),
        "tasks": {f"{split}, epoch {epoch}": counts for (split, epoch), counts in run.tasks.items()},
        "records": to_json(run.records),
        "past_outages": to_json(run.past_outages),
        "waiting_for_score": run.liveness.waiting_for_score,
        "engines": to_json(run.engines),
        "settings": to_json(run.settings),
        "configurations": to_json(run.configurations),
        "evaluations": to_json(run.evaluations[: -LAST_EVALUATIONS - 1 : -1]),
    }
