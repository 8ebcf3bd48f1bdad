"""A group filter of your own: it drops wrong answers that ran out of turns, and lucky guesses.

Name it on every sampler, no registration needed; the folder must be on PYTHONPATH::

    agentrl sample --run_name my_run --group_filter custom_group_filter:finished_and_tried …
"""

from agentrl import ScoredGroup, group_filter


@group_filter("finished_and_tried")
def finished_and_tried(group: ScoredGroup) -> dict[str, str]:
    """Return {id: reason} of the trajectories to drop; a list of the ids to keep works too."""
    dropped = {}
    for trajectory in group.trajectories:
        if trajectory.stop_reason == "turns_limit_error" and trajectory.score == 0:
            dropped[trajectory.id] = "it ran out of turns"
        elif trajectory.score == 1 and trajectory.tool_calls == 0 and group.meta.get("needs_tools"):
            dropped[trajectory.id] = "it guessed without a tool"
    return dropped
