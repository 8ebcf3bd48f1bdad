"""What a trainer takes its data from, live or stored, and what a step reports of its sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.documents.images import Image
from agentrl.documents.training import DBRecordData, StepOrigin

if TYPE_CHECKING:
    from agentrl.store.client import Store


@dataclass(frozen=True)
class StepData:
    """The groups of one step. ``is_rest``: sampling has ended and left fewer groups than a step takes."""

    groups: tuple[str, ...]
    data: tuple[DBRecordData, ...]
    ages: Mapping[int, int]
    """{version: age in optimizer steps}, for every policy version in ``data``."""
    is_rest: bool
    recorded: StepOrigin | None = None
    """The stored step that trained the data in another run; None for data of this run."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """New scores of Records that the other run scored otherwise, by ``_id``."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The groups, trained or abandoned, that a step reports on: the curve shows the policy, not the filter.

    These are the groups that no step has counted, finalized no later than the last of the step's own groups;
    if there are none, the step's own. ``commit_step`` marks them as counted, so that no group is in two
    windows.
    """

    groups: Sequence[Mapping[str, Any]]
    """``Task.group`` of each, with the Task's ``_id`` as ``task``."""

    @property
    def tasks(self) -> list[str]:
        """``_id`` of each group's Task."""
        return [group["task"] for group in self.groups]


class StepSource(Protocol):
    """``data.stream.DataStream`` or ``data.recorded.RecordedStream``."""

    end: str
    """What is true at the end of the data, as the log says it."""

    def prefetch(self, step: int) -> None:
        """Start to wait for the data of ``step``."""

    async def take(self, step: int) -> StepData | None:
        """Return the data of ``step``; None at the end of the data."""

    def avoid(self, data_ids: frozenset[str]) -> None:
        """Prefer groups other than those of ``data_ids``, whose step was skipped."""

    async def close(self) -> None:
        """Stop prefetching."""

    async def images(self, data: Sequence[DBRecordData]) -> Mapping[str, Image]:
        """Return the images of ``data`` by hash."""

    async def window(self, batch: StepData) -> Window:
        """Return the groups that the metrics of ``batch`` count."""

    async def report(self, step: int, batch: StepData, window: Window) -> dict[str, Any]:
        """Return what ``step`` reports of sampling and of its source."""


async def images_of(store: Store, data: Sequence[DBRecordData]) -> Mapping[str, Image]:
    """Return the images of ``data`` by hash. Raises ImageError for one that ``store`` does not hold."""
    named = {image.sha256 for item in data for image in item.images}
    return await store.images.get(named) if named else {}


async def step_window(store: Store, split: str, groups: Sequence[str]) -> Window:
    """Return the window of a step that trains ``groups``."""
    tasks = [await store.tasks.get(group) for group in groups]
    own = [{"task": task.id, **task.group} for task in tasks if task is not None and task.group is not None]
    end = max((group["finalized_at"] for group in own), default=None)
    uncounted = await store.groups.uncounted(split)
    within = [group for group in uncounted if end is None or group["finalized_at"] <= end]
    return Window(groups=within or own)


async def window_metrics(store: Store, window: Window, trained: Sequence[str]) -> dict[str, Any]:
    """Return ``trajectory_means``, ``masked_calls``, ``length_bias`` and ``prefix_cache_hit_rate``.

    ``masked_calls`` counts model calls that a sampling parameter excludes from training. ``length_bias`` is
    the mean number of generated tokens of the Records ``trained``, divided by that of all scored Records in
    the window, stale and filtered ones included. Below 1, training sees shorter trajectories than the policy
    generates. ``prefix_cache_hit_rate`` is the fraction of prompt tokens that engines did not compute again.
    """
    metrics: dict[str, Any] = trajectory_means(window.groups)
    metrics["masked_calls"] = sum(
        masked["calls"] for group in window.groups for masked in group.get("masked_calls", ())
    )
    sampled_mean = await store.training.mean_generated_tokens(tasks=window.tasks)
    trained_mean = await store.training.mean_generated_tokens(records=trained)
    if sampled_mean and trained_mean:
        metrics["length_bias"] = trained_mean / sampled_mean
    hit_rate = await store.training.prefix_cache_hit_rate(window.tasks)
    if hit_rate is not None:
        metrics["prefix_cache_hit_rate"] = hit_rate
    return metrics


def trajectory_means(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over every scored trajectory of the groups; empty without one.

    The keys are ``reward``, ``pass_rate``, ``abandoned_fraction`` (trajectories that did not become training
    data) and ``abandoned_groups`` (groups without any training data, because their scores agree).
    """
    scored = sum(summary["scored"] for summary in summaries)
    if not scored:
        return {}
    return {
        "reward": sum(s["mean_score"] * s["scored"] for s in summaries if s["scored"]) / scored,
        "pass_rate": sum(s["pass_rate"] * s["scored"] for s in summaries if s["scored"]) / scored,
        "abandoned_fraction": 1 - sum(s["trained"] for s in summaries) / scored,
        "abandoned_groups": sum(not s["trained"] for s in summaries) / len(summaries),
    }
