"""Group filters: user functions that drop trajectories of a scored group, chosen by ``--group_filter``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.documents.base import replace_surrogates
from agentrl.documents.record import Record
from agentrl.documents.task import Task
from agentrl.errors import GroupError
from agentrl.registry import Registry
from agentrl.user_code import contain_call, describe

_REASON_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """One scored trajectory, as a filter receives it."""

    id: str
    score: float
    turns: int
    """Number of model calls."""
    tool_calls: int
    generated_tokens: int
    """Tokens of all model calls."""
    stop_reason: str | None
    """A value of ``StopReason``, such as ``answered`` or ``turns_limit_error``."""
    final_answer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group, as a filter receives it: a copy of its task and of its scored trajectories."""

    task: str
    task_id: str
    """``id`` in the task file."""
    split: str
    epoch: int
    query: str
    answer: Any
    meta: Mapping[str, Any]
    """The other fields of the task file."""
    trajectories: tuple[ScoredTrajectory, ...]


GroupFilter = Callable[[ScoredGroup], Mapping[str, str] | Collection[str]]
"""Returns either {id: reason} of the trajectories to drop, or the ids to keep as a list, tuple or set."""

GROUP_FILTERS: Registry[GroupFilter] = Registry(
    "group filter", group="agentrl.group_filters", flag="--group_filter"
)


def group_filter(*names: str) -> Callable[[GroupFilter], GroupFilter]:
    """Register a function ``(ScoredGroup) -> {id: reason}`` or ``-> [id, …]`` under ``names``."""
    return GROUP_FILTERS.register(*names)


def dropped_by_filter(name: str, task: Task, records: Sequence[Record]) -> dict[str, str]:
    """Return which of the scored ``records`` of a group the filter ``name`` drops: {id: reason}.

    Raises GroupError for an exception in the filter and for a malformed result, ConfigError for a
    filter that does not exist or that this process may not import.
    """
    function = GROUP_FILTERS.get(name)
    what = f"group filter {name}"
    result = contain_call(lambda: function(_view(task, records)), what, GroupError)
    reasons = contain_call(
        lambda: _reasons(what, result, [record.id for record in records]), what, GroupError
    )
    return {key: f"{what}: {reason}" for key, reason in reasons.items()}


def _view(task: Task, records: Sequence[Record]) -> ScoredGroup:
    return ScoredGroup(
        task=task.id, task_id=task.task_id, split=task.split, epoch=task.epoch, query=task.query,
        answer=copy.deepcopy(task.answer), meta=copy.deepcopy(task.meta),
        trajectories=tuple(
            ScoredTrajectory(
                id=record.id, score=0.0 if record.score is None else record.score, turns=record.turns,
                tool_calls=record.tool_calls, generated_tokens=record.generated_tokens,
                stop_reason=None if record.stop_reason is None else record.stop_reason.value,
                final_answer=record.final_answer,
            )
            for record in records
        ),
    )  # fmt: skip


def _reasons(what: str, result: Any, ids: Sequence[str]) -> dict[str, str]:
    """Return {id: reason} of a filter's result. Raises GroupError for a malformed one."""
    if inspect.iscoroutine(result):
        result.close()
        raise GroupError(f"{what} is async", hint="write a plain function: def, not async def")
    if not isinstance(result, (Mapping, list, tuple, set, frozenset)):
        raise GroupError(f"{what} returned {describe(result)}", hint=_HINT)
    for key in result:
        if not isinstance(key, str) or key not in ids:
            raise GroupError(
                f"{what} names {describe(key)}, which is not a trajectory of the group", hint=_HINT
            )
    if not isinstance(result, Mapping):
        return {key: "not kept" for key in ids if key not in result}
    return {key: _reason(what, key, result[key]) for key in ids if key in result}


def _reason(what: str, key: str, reason: Any) -> str:
    if not isinstance(reason, str) or not reason.strip():
        raise GroupError(f"{what} drops {key} for the reason {describe(reason)}", hint=_HINT)
    return str(replace_surrogates(reason))[:_REASON_CHARS]


_HINT = "return {id: reason} of the trajectories to drop, or a list of the ids to keep"
