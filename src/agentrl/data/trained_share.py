"""Say how many sampled tokens of a trajectory can be trained, and why the others cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from agentrl.data.trajectory_tree import mask_reason
from agentrl.documents.model_call import DispatchedSamplingTask, branches_of, same_agent


def why_untrained(call: DispatchedSamplingTask, rule: str | None, left_out: Collection[int]) -> str | None:
    """Return why no token of ``call`` can be trained; None if they can. ``rule`` leaves out ``left_out``."""
    if call.fixed is not None:
        return f"answered by {call.fixed.model}, not by the policy"
    if call.index in left_out:
        return f"left out by train rule {rule}"
    parameter = mask_reason(call)
    return None if parameter is None else f"sampled with {parameter}"


def describe_share(
    calls: Sequence[DispatchedSamplingTask], rule: str | None, left_out: Collection[int]
) -> str:
    """Return ``57% of 1,200 sampled tokens can be trained; not: …``, and the rule that would train more."""
    sampled = sum(call.generated_tokens for call in calls if call.fixed is None)
    lost: Counter[str] = Counter()
    for call in calls:
        why = why_untrained(call, rule, left_out)
        if why is not None and call.fixed is None:
            lost[why] += call.generated_tokens
    trained = sampled - lost.total()
    text = f"{_percent(trained, sampled)} of {sampled:,} sampled tokens can be trained"
    if lost:
        text += "; not: " + ", ".join(f"{tokens:,} {why}" for why, tokens in lost.most_common())
    if rule == "main":
        agent = {
            index
            for role in {call.role for call in calls}
            for branch in same_agent(branches_of([call for call in calls if call.role == role]))
            for index in branch.indexes
        }
        other = {call.index for call in calls} - agent
        more = sum(call.generated_tokens for call in calls if why_untrained(call, "agent", other) is None)
        if more > trained:
            text += f" (train: agent would train {_percent(more, sampled)})"
    return text


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"
