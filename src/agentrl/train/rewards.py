"""What a step says of sampling: reward and lengths over the groups finalized since the step before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.store.client import Store


@dataclass(frozen=True, kw_only=True)
class Window:
    """The groups that a step reports on: ``Task.group`` of each, with the Task as ``task``.

    They are those that no step has counted, up to the last of the step's own groups, trained and abandoned
    ones alike, so that the curve shows the policy and not the filter. Where there are none, they are the
    step's own. ``commit_step`` marks them as counted: each group is in one step's window, never in two.
    """

    groups: Sequence[Mapping[str, Any]]

    @property
    def tasks(self) -> list[str]:
        """``_id`` of each group's Task."""
        return [group["task"] for group in self.groups]


async def step_window(store: Store, split: str, groups: Sequence[str]) -> Window:
    """The window of a step that trains ``groups``."""
    tasks = [await store.tasks.get(group) for group in groups]
    own = [{"task": task.id, **task.group} for task in tasks if task is not None and task.group is not None]
    end = max((group["finalised_at"] for group in own), default=None)
    uncounted = await store.training.uncounted_groups(split)
    within = [group for group in uncounted if end is None or group["finalised_at"] <= end]
    return Window(groups=within or own)


async def window_metrics(store: Store, window: Window, trained: Sequence[str]) -> dict[str, Any]:
    """Means over trajectories, ``masked_calls`` and ``length_bias``, as far as the window has them.

    ``masked_calls`` counts model calls that a sampling parameter keeps out of training.
    ``length_bias`` is the mean number of generated tokens of the Records ``trained`` over that of all scored
    ones of the window, stale and filtered ones included: below 1, training sees shorter trajectories than the
    policy writes.
    """
    metrics: dict[str, Any] = trajectory_means(window.groups)
    metrics["masked_calls"] = sum(
        masked["calls"] for group in window.groups for masked in group.get("masked_calls", ())
    )
    sampled_mean = await store.training.mean_generated_tokens(tasks=window.tasks)
    trained_mean = await store.training.mean_generated_tokens(records=trained)
    if sampled_mean and trained_mean:
        metrics["length_bias"] = trained_mean / sampled_mean
    return metrics


def trajectory_means(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over every scored trajectory of the groups; empty without one.

    ``reward`` and ``pass_rate``; ``abandoned_fraction``, the share of trajectories that became no training
    data; ``abandoned_groups``, the share of groups of which nothing did, since their scores agree.
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
