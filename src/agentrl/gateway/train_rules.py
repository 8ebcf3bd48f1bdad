"""Choose which branches of a trajectory are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from agentrl.documents.model_call import Branch, DispatchedSamplingTask, branches_of, main_branch, same_agent
from agentrl.errors import TrajectoryError
from agentrl.registry import Registry
from agentrl.user_code import contain_call, describe

TrainRule = Callable[[Sequence[Branch]], Sequence[int]]
"""Returns the indexes of the model calls to train."""

TRAIN_RULES: Registry[TrainRule] = Registry("train rule", group="agentrl.train_rules")


@TRAIN_RULES.register("main")
def train_main(branches: Sequence[Branch]) -> Sequence[int]:
    """Train the main branch only: not titles, summaries, sub-agents, and not what an edit left behind."""
    main = main_branch(branches)
    return () if main is None else main.indexes


@TRAIN_RULES.register("agent")
def train_agent(branches: Sequence[Branch]) -> Sequence[int]:
    """Train every branch with the system prompt and the tools of the main branch.

    So an agent that replaces its history by a summary is trained before and after it.
    """
    return [index for branch in same_agent(branches) for index in branch.indexes]


@TRAIN_RULES.register("all")
def train_all(branches: Sequence[Branch]) -> Sequence[int]:
    """Train every call."""
    return [index for branch in branches for index in branch.indexes]


def require_rule(name: str) -> TrainRule:
    """Return a rule: main, agent, all, or module:function. Raises ConfigError."""
    return TRAIN_RULES.get(name)


def untrained(name: str, calls: Sequence[DispatchedSamplingTask]) -> list[int]:
    """Return the indexes of the calls that the rule ``name`` leaves out. Raises TrajectoryError.

    The rule chooses among the branches of each role.
    """
    rule = require_rule(name)
    chosen: list[int] = []
    for role in {call.role: None for call in calls}:
        choose = partial(_chosen, rule, [call for call in calls if call.role == role])
        chosen += contain_call(choose, f"train rule {name}", TrajectoryError)
    known = {call.index for call in calls}
    if not known.issuperset(chosen):
        raise TrajectoryError(
            f"train rule {name} returned {describe(chosen)}, and the calls are 0 to {len(known) - 1}",
            hint="return indexes of model calls, as in Branch.indexes",
        )
    return sorted(known.difference(chosen))


def _chosen(rule: TrainRule, calls: Sequence[DispatchedSamplingTask]) -> list[int]:
    return list(rule(branches_of(calls)))
