"""The status of one run on one screen of 80 columns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.observe.live import number
from agentrl.observe.terminal import MISSING, age, excerpt, fixed
from agentrl.store.views.rows import StepRow
from agentrl.store.views.run_status import Activity, RunStatus

ACTIVITY_STYLES: dict[Activity, str] = {
    "training": "bold green",
    "sampling": "bold cyan",
    "finished": "green",
    "serving": "yellow",
    "idle": "dim",
}
_BARS = "▁▂▃▄▅▆▇█"
_LABEL_WIDTH = 10
_NAMES_SHOWN = 6
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render_run_status(status: RunStatus, *, output_free: int | None = None) -> RenderableType:
    """Return the screen; ``output_free`` is the free space of this machine's output folder, in bytes."""
    title = Text(status.run_name, style="bold")
    title.append(f"  {status.activity}", style=ACTIVITY_STYLES[status.activity])
    title.append(f"  {status.at:%Y-%m-%d %H:%M:%S} UTC", style="dim")
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_LABEL_WIDTH, style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _lines(status, output_free):
        grid.add_row(label, text)
    return Group(title, grid)


def _lines(status: RunStatus, output_free: int | None) -> Iterator[tuple[str, Text]]:
    yield from _step_lines(status)
    yield "rate", _rate(status)
    yield "queues", _queues(status)
    yield "trainer", _trainer(status)
    yield "samplers", _samplers(status)
    yield from _engines(status)
    for outage in status.outages:
        text = Text(f"{outage.dependency}", style="bold red")
        text.append(f" since {age(outage.began_at, status.at)}, {outage.held} calls held: ", style="red")
        yield "down", text.append(excerpt(outage.why, 120))
    for failure in status.failures[:_NAMES_SHOWN]:
        text = Text(f"{failure.kind} {failure.count:,}", style="yellow")
        yield "failed", text.append(f"  {excerpt(failure.message, 100)}", style="dim")
    yield "disk", _disk(status, output_free)


def _step_lines(status: RunStatus) -> Iterator[tuple[str, Text]]:
    if not status.steps:
        yield "step", Text("no optimizer step yet")
        return
    last = status.steps[-1]
    metrics = last.metrics
    text = Text(f"{last.step}", style="bold")
    text.append(f"  {age(last.committed_at or last.planned_at, status.at)}")
    text.append(f"  {_steps_per_hour(status.steps)} steps/h")
    text.append(f"  {number(metrics, 'tokens_per_second', ',.0f')} tok/s trained", style="dim")
    yield "step", text
    rewards = [step.reward for step in status.steps]
    text = Text(fixed(last.reward), style="bold green")
    text.append(f"  {sparkline(rewards)}", style="green")
    text.append(f"  pass rate {fixed(last.pass_rate, 2)}  KL(μ‖π) {number(metrics, 'kl_k3', '.1e')}")
    yield "reward", text
    stale = f"mean {fixed(last.staleness_mean, 2)}, max {fixed(last.staleness_max, 0)} steps"
    yield "staleness", Text(stale)


def _rate(status: RunStatus) -> Text:
    rates = status.rates
    text = Text(f"{rates.per_minute:.1f} scored trajectories/min")
    text.append(f", mean score {fixed(rates.mean_score)}, {rates.failed} failed")
    text.append(f", {rates.generated_tokens / rates.seconds:,.0f} tok/s generated")
    return text.append(f" (last {rates.seconds / 60:.0f} min)", style="dim")


def _queues(status: RunStatus) -> Text:
    queues = status.queues
    return Text(
        f"groups: {queues.tasks_created} to come, {queues.tasks_running} open, {queues.tasks_waiting} to"
        f" finalize, {queues.tasks_completed} done; trajectories: {queues.waiting_for_score} to score,"
        f" {queues.data_ready} ready, {queues.data_planned} planned, {queues.data_trained} trained"
    )


def _trainer(status: RunStatus) -> Text:
    trainer = status.trainer
    if trainer is None:
        return Text("none" if status.ended is None else str(status.ended), style="dim")
    name = excerpt(trainer.owner, 60)
    return Text(name) if trainer.alive else Text(f"{name}, ended or silent", style="yellow")


def _samplers(status: RunStatus) -> Text:
    if not status.samplers:
        return Text(f"none holds a claim; the last trajectory began {age(status.last_claim, status.at)}")
    names = [f"{excerpt(name, 40)} ({claims})" for name, claims in status.samplers.items()]
    more = f", {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    total = sum(status.samplers.values())
    return Text(f"{len(names)} with {total} claims: {', '.join(names[:_NAMES_SHOWN])}{more}")


def _engines(status: RunStatus) -> Iterator[tuple[str, Text]]:
    if not status.engines:
        yield "engines", Text("none", style="dim")
    for engine in status.engines[:_NAMES_SHOWN]:
        text = Text(f"{excerpt(engine.url, 40)} {engine.engine} ")
        text.append(str(engine.status) if engine.alive else "dead", style="green" if engine.alive else "red")
        version = MISSING if engine.policy_version is None else str(engine.policy_version)
        text.append(f" version {version}, {engine.running_requests} running")
        text.append(f", heard {age(engine.heartbeat, status.at)}", style="dim")
        if engine.detail:
            text.append(f"  {excerpt(engine.detail, 60)}", style="yellow")
        yield "engine", text
    rest = Counter("live" if engine.alive else "dead" for engine in status.engines[_NAMES_SHOWN:])
    if rest:
        yield "engines", Text("more: " + ", ".join(f"{count} {what}" for what, count in rest.items()))


def _disk(status: RunStatus, output_free: int | None) -> Text:
    disk = status.disk
    parts = []
    if disk.run is not None:
        parts.append(f"database {amount(disk.run)}")
    if disk.free is not None:
        parts.append(f"{amount(disk.free)} free on the server")
    if output_free is not None:
        parts.append(f"{amount(output_free)} free for checkpoints here")
    return Text(", ".join(parts) or MISSING)


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
