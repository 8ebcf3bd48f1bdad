"""Show the token tree of a trajectory: its branches and roles, what of it can train, its reported reward."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

from rich.console import RenderableType

from agentrl.data.trained_share import why_untrained
from agentrl.documents.branches import Branch, branches_of, main_branch
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.observe.terminal import excerpt, fixed, plain, table


def render_branches(record: Record, calls: Sequence[DispatchedSamplingTask]) -> Iterator[RenderableType]:
    """Yield the rule of training and a row for each branch, if the model calls form a tree of branches."""
    is_tree = record.train_rule is not None or any(call.role or call.opens_branch for call in calls)
    if not is_tree or not calls:
        return
    left_out = record.untrained_calls
    untrained = {call.index for call in calls if why_untrained(call, record.train_rule, left_out)}
    if record.train_rule is not None:
        chosen = len(calls) - len(left_out)
        yield plain(f"train rule {record.train_rule}: it chooses {chosen} of {len(calls)} model calls")
    branches = branches_of(calls)
    main = main_branch(branches)
    rows = [
        [
            number,
            " ".join(str(index + 1) for index in branch.indexes),
            _what(branch, is_main=branch is main),
            _trained(branch, untrained),
            excerpt(_beginning(branch), 60),
        ]
        for number, branch in enumerate(branches, 1)
    ]
    yield table("Branches", ["branch", "turns", "what", "can train", "last request"], rows, text=4)


def call_notes(call: DispatchedSamplingTask, record: Record) -> str:
    """Return what the title of a turn says about its place in the tree."""
    notes = []
    if call.role is not None:
        notes.append(f"role {call.role}")
    if call.fixed is not None:
        notes.append(f"answered by {call.fixed.model}")
    before = call.parent or call.follows
    if before is not None and before != f"{call.record}/{call.index - 1}":
        notes.append(f"continues turn {int(before.rpartition('/')[2]) + 1}")
    if call.index in record.untrained_calls:
        notes.append("not trained")
    return "".join(f" · {note}" for note in notes)


def render_reward(record: Record) -> Iterator[RenderableType]:
    """Yield the reward that the agent reported through its gateway, if any."""
    reward = record.reported_reward
    if reward is None:
        return
    by_call = sorted((int(call), value) for call, value in reward.turn_rewards.items())
    calls = "".join(f", turn {call + 1} {value:+g}" for call, value in by_call)
    details = f"  {json.dumps(reward.details, ensure_ascii=False, default=str)}" if reward.details else ""
    yield plain(f"reported   score {fixed(reward.score)} by the agent{calls}{details}")


def _what(branch: Branch, *, is_main: bool) -> str:
    role = branch.calls[-1].role
    if role is not None:
        return f"role {role}"
    return "main" if is_main else "side, with tools" if branch.has_tools else "side"


def _trained(branch: Branch, untrained: Collection[int]) -> str:
    left_out = [index for index in branch.indexes if index in untrained]
    if not left_out:
        return "yes"
    if len(left_out) == len(branch.calls):
        return "no"
    return "not turns " + " ".join(str(index + 1) for index in left_out)


def _beginning(branch: Branch) -> str:
    """Return the first text that its last call adds: branches that share their beginning differ there."""
    texts = (message.get("content") for message in branch.calls[-1].messages)
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")
