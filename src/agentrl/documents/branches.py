"""Find the branches of a trajectory whose model calls form a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.documents.model_call import DispatchedSamplingTask


@dataclass(frozen=True, slots=True)
class Branch:
    """A conversation from its first model call to its last. Branches may share their first calls."""

    calls: tuple[DispatchedSamplingTask, ...]

    @property
    def has_tools(self) -> bool:
        """Return whether tools were offered."""
        return any(call.tools for call in self.calls)

    @property
    def indexes(self) -> tuple[int, ...]:
        """Return the indexes of its calls."""
        return tuple(call.index for call in self.calls)


def branches_of(calls: Sequence[DispatchedSamplingTask]) -> list[Branch]:
    """Return a branch for each call that no other call continues, in the order of their last calls."""
    by_id = {call.id: call for call in calls}
    continued = {call.parent or call.follows for call in calls}
    return [Branch(_path(by_id, call)) for call in calls if call.id not in continued]


def main_branch(branches: Sequence[Branch]) -> Branch | None:
    """Return the branch with the most calls; of several, one with tools, then the one that grew longest."""
    return max(
        branches,
        key=lambda branch: (len(branch.calls), branch.has_tools, branch.calls[-1].prompt_tokens),
        default=None,
    )


def same_agent(branches: Sequence[Branch]) -> list[Branch]:
    """Return the branches with the system prompt and the tools of the main branch, which is one of them."""
    main = main_branch(branches)
    return [branch for branch in branches if main is not None and _setting(branch) == _setting(main)]


def _setting(branch: Branch) -> tuple[object, object]:
    """Return the system messages and the tools of a branch."""
    first = branch.calls[0]
    return [message for message in first.messages if message["role"] == "system"], first.tools


def of_main_role(calls: Sequence[DispatchedSamplingTask]) -> list[DispatchedSamplingTask]:
    """Return the calls of the trajectory's own conversation; if it has none, those of the first role."""
    name = calls[0].role if calls and all(call.role is not None for call in calls) else None
    return [call for call in calls if call.role == name]


def _path(
    by_id: Mapping[str, DispatchedSamplingTask], last: DispatchedSamplingTask
) -> tuple[DispatchedSamplingTask, ...]:
    path = [last]
    while (before := path[-1].parent or path[-1].follows) is not None:
        path.append(by_id[before])
    return tuple(reversed(path))
