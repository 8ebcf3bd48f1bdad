"""Report what was sampled for a step: rewards, abandoned trajectories, lengths, cache hits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.store.client import Store


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
